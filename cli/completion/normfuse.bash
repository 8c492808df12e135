# SPDX-License-Identifier: MIT
#
# Completion of the program normfuse for bash; installed as bash-completion/completions/normfuse.

_normfuse()
{
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local word command="" operators="group_norm instance_norm batch_norm affine channel_norm" words options
    local types="f64 f32 f16 bf16"
    COMPREPLY=()

    # '=' is a word of its own in COMP_WORDS: KEY = VALUE.
    local key=""
    if [[ $current == "=" ]]; then
        key=$previous current=""
    elif [[ $previous == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    case $key in
        layout) words="nchw nhwc" ;;
        act) words="identity relu leaky_relu silu gelu gelu_tanh hardswish elu mish relu6 prelu" ;;
        dtype | weight_dtype | y_dtype) words=$types ;;
        mode) words="train eval" ;;
        stat) words="layer rms" ;;
        eps_kind) words="added norm" ;;
        per) words="channel sample" ;;
        dir) words="fwd bwd" ;;
        device) words="cpu cuda" ;;
        --*) previous=$key words="" ;;
        ?*) return ;;
    esac
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi

    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case $word in
            info | run | check | bench | compile)
                command=$word
                break
                ;;
        esac
    done
    case $command in
        "")
            COMPREPLY=($(compgen -W "info run check bench compile --help --version" -- "$current"))
            return
            ;;
        info) options="--json --help" words="" ;;
        run)
            options="--output --weight --bias --pre-add --pre-bias --sum-out --post-add --scale --shift --slope --mean --rstd
                --running-mean --running-var --new-running-mean --new-running-var --backward --du --dx --dweight
                --dbias --dscale --dshift --dpost-add --dpre-bias --dslope --threads --block-bytes --sync --quiet --help"
            words="$operators groups= layout= act= act_param= eps= stat= eps_kind= mode= momentum= seen= per= dtype=
                weight_dtype= y_dtype= device="
            ;;
        check) options="--random --seed --min-bytes --max-bytes --list --threads --json --help" ;;
        bench) options="--random --seed --min-bytes --max-bytes --list --json --warm --samples --threads --html --help" ;;
        compile) options="--random --seed --min-bytes --max-bytes --list --gpu --output --help" ;;
    esac
    if [[ $command == check || $command == bench || $command == compile ]]; then
        words="$operators groups= layout= act= act_param= eps= stat= eps_kind= mode= per= dtype= weight_dtype= y_dtype= dir= device=
            +pre_add +u +post_add +scale +one_slope +mixed"
    fi
    case $previous in
        --threads | --block-bytes | --samples | --seed | --random | --min-bytes | --max-bytes | --gpu | -g | -n | -r | -s) return ;;
        --json | --quiet | --sync | --warm | --list | --help | -j | -q | -w | -l) ;;
        --* | -o | -b)
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -f -- "$current"))
            return
            ;;
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [[ $current == @* ]]; then
        COMPREPLY=($(compgen -P @ -f -- "${current#@}"))
    else
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        if [[ $command == run ]]; then
            compopt -o filenames 2>/dev/null
            COMPREPLY+=($(compgen -f -- "$current"))
        fi
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}

complete -F _normfuse normfuse
