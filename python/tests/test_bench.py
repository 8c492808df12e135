# SPDX-License-Identifier: MIT
"""`make bench-peers` at a small size: its rows, its table, what it leaves out and why, its progress bar, and what is
left of it when it is interrupted. Times mean nothing here."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "build/normfuse"
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]
import peers  # noqa: E402
from terminal import default_signal, on_a_terminal  # noqa: E402

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="build/normfuse is not built")
PROBLEMS = ["group_norm 2x64x8x8 groups=8", "batch_norm 4x8x10x10 act=relu dir=bwd"]


def words(folder, *more, python=sys.executable):
    return [str(python), str(ROOT / "bench/run_peers.py"), "--tiny", "--threads", "1", "--folder", str(folder), *more]


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python that has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return folder / "bin/python"


def test_steps_write_rows_and_a_table(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(words(tmp_path, "--samples", "3", *PROBLEMS), capture_output=True, text=True, timeout=300)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0 and "\r" not in done.stderr, done.stdout + done.stderr + logs
    rows = rows_of(tmp_path, "peers")
    assert {row["problem"] for row in rows} == set(PROBLEMS)
    for implementation in ("normfuse", "torch"):
        mine = [row for row in rows if row["impl"] == implementation]
        assert len(mine) == 2 and all(row["ratio"] > 0 and row["median_us"] > 0 for row in mine)
    table = (tmp_path / "table.md").read_text()
    assert table.strip() in done.stdout
    for row in rows:
        line = next(line for line in table.splitlines() if line.startswith(f"| `{row['problem']}`"))
        assert f" {row.get('ratio', '-')} |" in line
    assert not any("failed" in row for row in rows_of(tmp_path, "torch_operators"))
    medians = {(row["problem"], row["variant"]): row["median_us"] for row in rows_of(tmp_path, "torch_operators")}
    assert {variant for _, variant in medians} == {"eager", "normfuse"}
    assert all(f" {median} |" in table for median in medians.values())
    left_out = table.split("## Left out")[1]
    for name, packages in (("jax_operators", ("jax", "flax")), ("onnx_operators", ("onnx", "onnxruntime"))):
        if (tmp_path / f"{name}.jsonl").exists():
            assert all(f"`{row['problem']}" in table and row["tiny"] for row in rows_of(tmp_path, name))
        else:
            assert any(f"{name}: " in line and package in line for line in left_out.splitlines()
                       for package in packages)
    assert "apex is left out: apex is not installed" in left_out or [row for row in rows if row["impl"] == "apex"]


def test_synchronized_batch_norm():
    """Rows of two processes over gloo."""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, ROOT / "bench/sync_batch_norm.py", "--rounds", "1", "3x4x5x5"],
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["direction"], row["how"]) for row in rows] == [("forward", "eager"), ("step", "eager")]
    assert all(row["processes"] == 2 and row["local_us"] > 0 and row["sync_us"] > 0 and "failed" not in row
               for row in rows)


def test_what_is_not_installed_is_named(tmp_path, bare):
    done = subprocess.run(words(tmp_path, "--samples", "3", PROBLEMS[0], python=bare), capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    assert [row["impl"] for row in rows_of(tmp_path, "peers")] == ["normfuse"]
    for reason in ("torch_operators: numpy, torch not installed", "jax_operators: numpy, jax, flax not installed",
                   "onnxruntime is left out: numpy is not installed, onnx is not installed, onnxruntime is not installed",
                   "apex is left out: numpy is not installed, torch is not installed, apex is not installed"):
        assert f"- {reason}\n" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers.jsonl", "peers.log", "table.md"]


def test_a_terminal_has_a_bar(tmp_path, bare):
    status, shown = on_a_terminal(words(tmp_path, "--samples", "3", *PROBLEMS, python=bare), 60,
                                  stdout=subprocess.DEVNULL)
    assert status == 0
    lines = shown.decode().split("\r\x1b[K")
    assert f"[{' ' * 20}] peers 0/2 " in lines and f"[{'#' * 20}] peers 2/2" in lines[-2] and lines[-1] == "", lines
    assert any(line.startswith(f"[{'#' * 10}{' ' * 10}] peers 1/2 group_norm") for line in lines), lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_rows(tmp_path, bare, number):
    problems = tmp_path / "problems.txt"
    problems.write_text("".join(f"group_norm {n}x64x32x32 groups=32\n" for n in range(1, 400)))
    child = subprocess.Popen(words(tmp_path / "rows", f"@{problems}", python=bare), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True,
                             preexec_fn=lambda: default_signal(number))
    log, end = tmp_path / "rows/peers.log", time.monotonic() + 60
    while not log.exists() or log.read_text().count("groups=32") < 2:  # lines of two problems that are measured
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    assert (tmp_path / "rows/peers.jsonl").read_text().count("\n") >= 2
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in errors, errors
    rows = rows_of(tmp_path / "rows", "peers")
    assert len(rows) >= 2 and all(f"`{row['problem']}` | {row['ratio']} |" in output for row in rows)
    assert "- peers: interrupted, and the steps behind it" in (tmp_path / "rows/table.md").read_text()
    with pytest.raises(ProcessLookupError):  # no process of it is left
        for _ in range(100):
            os.killpg(child.pid, 0)
            time.sleep(0.05)


def test_a_gpu_is_for_those_that_have_one():
    problem = peers.parse("group_norm 2x64x8x8 groups=8 device=cuda")
    assert problem["device"] == "cuda" and peers.parse(PROBLEMS[0])["device"] == "cpu"
    for worker in (peers.jax_worker, peers.onnxruntime_worker, peers.onednn_worker):
        with pytest.raises(peers.Unsupported, match="CPU only"):
            worker(problem, 1, 1)
    with pytest.raises(SystemExit, match="device=cuda"):  # torch_operators.py has --device
        peers.parse(problem["line"], additions=True)


@pytest.mark.parametrize("captures", [True, False])
def test_times_on_a_gpu_are_those_of_a_call(monkeypatch, captures):
    """On a stand-in for torch.cuda, whose clock counts calls: each takes 2 ms."""
    state = types.SimpleNamespace(clock=0, recorded=None)

    def call(i):
        if state.recorded is None:
            state.clock += 2
        elif captures:
            state.recorded.append(i)
        else:
            raise RuntimeError("not permitted when the stream is capturing")

    class Graph:
        def replay(self):
            state.clock += 2 * len(self.calls)

    class Capture:
        def __init__(self, graph, stream):
            state.recorded = graph.calls = []

        def __enter__(self):
            return self

        def __exit__(self, *error):
            state.recorded = None

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = state.clock

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    class Stream:
        def wait_stream(self, other):
            pass

    import contextlib
    cuda = types.SimpleNamespace(CUDAGraph=Graph, graph=Capture, Event=Event, Stream=Stream, current_stream=Stream,
                                 stream=lambda stream: contextlib.nullcontext(), synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    times, how = peers.measure_cuda(call, 5, 4, 10.0)
    assert times == [2000.0] * 4 and how == ("CUDA graph" if captures else "eager, not captured")


@pytest.mark.parametrize("additions", [False, True])
@pytest.mark.parametrize("word, says", [("", None), ("+pre_bias", "channel"), ("+pre_bias=sample", "sample")])
def test_pre_bias_is_read(word, says, additions):
    assert peers.parse(f"batch_norm 4x8x5x5 {word}", additions)["pre_bias"] == says
    with pytest.raises(SystemExit, match="not a key"):
        peers.parse("batch_norm 4x8x5x5 +pre_bias=channel", additions)


@pytest.mark.parametrize("line",
                         ["group_norm 3x8x5x7 groups=2 +pre_bias",
                          "group_norm 3x8x5x7 groups=2 layout=nhwc +pre_bias=sample",
                                  "affine 3x8x5x7 layout=nhwc +pre_bias",
                                  "batch_norm 3x8x5x7 act=silu +pre_bias=sample"])
@pytest.mark.parametrize("peer", ["torch", "jax"])
def test_peers_add_pre_bias(peer, line):
    """dx, dweight, dbias, dpre_bias; the last one is the sum of dx over what shares the bias."""
    numpy = pytest.importorskip("numpy")
    pytest.importorskip(peer)
    problem = peers.parse(line + " dir=bwd")
    makers, _ = {"torch": peers.torch_worker, "jax": peers.jax_worker}[peer](problem, 1, 1)
    dx, _, _, dpre_bias = (numpy.asarray(t, float) for t in makers[peer]()[0](0))
    channel = dx.ndim - 1 if peer == "jax" and problem["layout"] == "nhwc" else 1
    shared = tuple(a for a in range(dx.ndim) if a != channel and (a > 0 or problem["pre_bias"] == "channel"))
    assert numpy.abs(dx.sum(shared, keepdims=True) - dpre_bias).max() < 1e-4
    assert dpre_bias.size == (24 if "sample" in line else 8)


@pytest.mark.parametrize("word, shape", [("+pre_bias", (1, 8, 1, 1)), ("+pre_bias=sample", (3, 8, 1, 1))])
def test_onnxruntime_adds_pre_bias(word, shape):
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    makers, _ = peers.onnxruntime_worker(peers.parse(f"affine 3x8x5x7 {word}"), 1, 1)
    run, _ = makers["onnxruntime"]()
    run(0)
    _, x, y = run.arrays[0]
    random = numpy.random.default_rng(0)
    weight, bias, pre_bias = (random.random(sizes, dtype=numpy.float32) + 0.5
                              for sizes in ((1, 8, 1, 1), (1, 8, 1, 1), shape))
    assert numpy.abs(weight * (x.numpy() + pre_bias) + bias - y.numpy()).max() < 1e-5


@pytest.mark.parametrize("line",
                         ["group_norm 3x8x5x7 groups=2", "group_norm 3x8x5x7 groups=2 layout=nhwc",
                          "instance_norm 3x8x5x7",
                                  "batch_norm 3x8x5x7 layout=nhwc", "batch_norm 3x8x5x7 dir=bwd"])
def test_onednn_computes_the_problem(line):
    numpy = pytest.importorskip("numpy")
    if not peers.open_onednn():
        pytest.skip("libdnnl.so.3 is not found")
    problem = peers.parse(line)
    try:
        makers, _ = peers.onednn_worker(problem, 1, 1)
    except peers.Unsupported as error:  # an older version lacks the operator
        pytest.skip(str(error))
    except RuntimeError as error:  # a build for SYCL has no engine where there is no device for it
        if not str(error).startswith("dnnl_engine_create"):
            raise
        pytest.skip(str(error))
    run, _ = makers["onednn"]()
    run(0)
    weight, bias, mean, variance, x, result, *gradients = run.arrays
    last = problem["layout"] == "nhwc"

    def sets(array):
        values = array.reshape(3, 5, 7, 8).transpose(0, 3, 1, 2) if last else array.reshape(3, 8, 5, 7)
        values = values.astype(float)
        if problem["op"] == "batch_norm":
            return values.transpose(1, 0, 2, 3).reshape(8, -1)[None]
        return values.reshape(3, problem["groups"], -1)

    def per_channel(array):
        return sets(numpy.broadcast_to(array, (3, 5, 7, 8)) if last
                    else numpy.broadcast_to(array[:, None, None], (3, 8, 5, 7)))

    if not problem["backward"]:
        d = sets(x) - sets(x).mean(2, keepdims=True)
        want = d / numpy.sqrt((d * d).mean(2, keepdims=True) + 1e-5) * per_channel(weight) + per_channel(bias)
        assert abs(want - sets(result)).max() < 1e-5
        return
    dweight, dbias, dy = gradients
    rstd = 1 / numpy.sqrt(variance[:, None] + 1e-5)
    h, g = (sets(x) - mean[:, None]) * rstd, sets(dy) * per_channel(weight)
    want = rstd * (g - g.mean(2, keepdims=True) - h * (g * h).mean(2, keepdims=True))
    assert abs(want - sets(result)).max() < 1e-5
    assert abs(sets(dy).sum((0, 2)) - dbias).max() < 1e-4 and abs((sets(dy) * h).sum((0, 2)) - dweight).max() < 1e-4
