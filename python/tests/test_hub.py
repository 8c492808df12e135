# SPDX-License-Identifier: MIT
"""The package for the Kernel Hub (hub/), as Hugging Face's `kernels` loads it: the repository's parts, and layers that
kernelize puts into models of stock PyTorch, beside those models as they were. Without `kernels` these are skipped; what
needs the standard library alone runs."""
import ast
import copy
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: everything is in a local folder
torch = pytest.importorskip("torch")
from device import DEVICE, default_device  # noqa: E402, F401
from normfuse import _library  # noqa: E402
from torch import nn  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_spec = importlib.util.spec_from_file_location("hub_build", ROOT / "hub/build.py")
hub_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hub_build)
MACHINE = platform.machine()
pytestmark = pytest.mark.skipif(MACHINE not in hub_build.VARIANTS, reason=f"there is no variant for {MACHINE}")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "normfuse"
    hub_build.build(out, {MACHINE: _library.library.path}, "0123abc", any_glibc=True)
    return out


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("kernels", reason="the package `kernels` is not installed")


@pytest.fixture(scope="module")
def loaded(kernels, repository):
    return kernels.get_local_kernel(repository)


# ---- the repository -------------------------------------------------------------------------------------------------


def test_variants(repository):
    names = {path.name for path in (repository / "build").iterdir()}
    assert names == {f"torch-stable-abi210-{backend}-{MACHINE}-linux" for backend in hub_build.VARIANTS[MACHINE]}
    assert {path.name for path in repository.iterdir()} == {"build", "build.toml", "flake.nix", "README.md", "LICENSE"}
    identifiers = set()
    for variant in (repository / "build").iterdir():
        about = json.loads((variant / "metadata.json").read_text())
        namespace = {}
        exec((variant / "torch/_namespace.py").read_text(), namespace)
        assert namespace["NAMESPACE"] == about["id"] and about["id"].isidentifier()
        assert about["backend"]["type"] == ("cpu" if "-cpu-" in variant.name else "cuda")
        identifiers.add((about["backend"]["type"], about["id"]))
    assert len(identifiers) == len({identifier for _, identifier in identifiers})


def test_python_of_the_package(repository):
    """Syntax of Python 3.9; imports of the standard library, PyTorch and the package itself, the latter relative."""
    variant = next((repository / "build").glob("*-cpu-*"))
    for path in sorted(variant.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                     [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else [])
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top == "torch", f"{path.name} imports {name}"


def test_library_beyond_manylinux(tmp_path):
    """What build.py refuses: a symbol of newer glibc, one of Python, a library that PyTorch does not bring."""
    def beyond(source, *words):
        (tmp_path / "l.c").write_text(source)
        done = subprocess.run([os.environ.get("CC") or "cc", "-shared", "-fPIC", "-o", tmp_path / "l.so",
                               tmp_path / "l.c", *words], stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            pytest.skip(f"the C compiler cannot make it: {done.stderr[-200:]}")
        return hub_build.beyond(tmp_path / "l.so")

    assert beyond("#include <string.h>\nint f(const char *s) { return (int)strlen(s); }") == []
    assert beyond("extern void *PyList_New(long); void *f(void) { return PyList_New(0); }") == ["PyList_New"]
    newer = beyond('extern void g(void);\n__asm__(".symver g, arc4random@GLIBC_2.36");\nvoid f(void) { g(); }')
    assert newer == ["arc4random@GLIBC_2.36"]
    (tmp_path / "other.c").write_text("void other(void) {}\n")
    subprocess.run([os.environ.get("CC") or "cc", "-shared", "-fPIC", "-Wl,-soname,libother.so.1", "-o",
                    tmp_path / "libother.so", tmp_path / "other.c"], check=True)
    assert beyond("extern void other(void); void f(void) { other(); }", f"-L{tmp_path}", "-lother") == ["libother.so.1"]


def test_digests_and_metadata(kernels, repository):
    """By the package that will read them; build.toml, too."""
    from kernels._rust import Backend, Build, Digest, DigestValidationError, Metadata
    for variant in (repository / "build").iterdir():
        about = Metadata.read_from_file(variant / "metadata.json")
        about.digest.validate(Digest.hash_variant(about.digest.algorithm, variant))
        assert (about.version, about.license, about.python_depends) == (0, "mit", [])
    assert about.name.python_name == "normfuse"
    assert set(Build.open(repository).general.backends) == {Backend.CPU, Backend.CUDA}
    (variant / "layers.py").write_text((variant / "layers.py").read_text() + "\n")
    with pytest.raises(DigestValidationError):
        about.digest.validate(Digest.hash_variant(about.digest.algorithm, variant))


def test_architectures(kernels):
    from kernels.archs import _supports_cuda_capability
    for capability, is_taken in (((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        assert _supports_cuda_capability(hub_build.ARCHITECTURES, capability) is is_taken


# ---- functions ------------------------------------------------------------------------------------------------------


def test_beside_the_installed_package(loaded):
    """Operators in a namespace of their own, with the same results; a model that the package converts."""
    import normfuse.torch as nft
    assert loaded.__name__.endswith("_0123abc") and loaded.group_norm is not nft.group_norm
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    for y in (nft.group_norm(x, 2, activation="silu"), loaded.group_norm(x, 2, activation="silu")):
        assert torch.allclose(y, nn.functional.silu(nn.functional.group_norm(x, 2)), atol=1e-6)
        y.sum().backward()
    operators = {name: getattr(torch.ops, name).group_norm.default for name in (loaded.__name__, "normfuse")}
    assert len(set(operators.values())) == 2
    results = [operator(x, None, None, *[None] * 6, 2, 1e-5, 0, 0.0, False)[0] for operator in operators.values()]
    assert torch.equal(*results)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    image, expected = torch.randn(1, 3, 9, 9), None
    expected = model(image)
    assert str(loaded.convert(model)).startswith("1 of 1 norms converted; 1 fused")
    assert torch.allclose(model(image), expected, atol=1e-5)


def test_two_builds_in_one_process(kernels, loaded, tmp_path):
    hub_build.build(tmp_path / "normfuse", {MACHINE: _library.library.path}, "4567def", any_glibc=True)
    other = kernels.get_local_kernel(tmp_path / "normfuse")
    assert other.__name__ != loaded.__name__
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(other.group_norm(x, 2), loaded.group_norm(x, 2))


def test_older_kernels_packages(repository):
    """They import the folder of the kernel's name inside the variant."""
    variant = next((repository / "build").glob("*-cpu-*"))
    words = ("import importlib.util, sys, torch\n"
             f"spec = importlib.util.spec_from_file_location('normfuse_by_name', {str(variant / 'normfuse/__init__.py')!r})\n"
             "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
             "x = torch.randn(2, 4, 3)\n"
             "assert torch.allclose(module.layers.GroupNorm.forward(torch.nn.GroupNorm(2, 4), x),\n"
             "                      torch.nn.functional.group_norm(x, 2), atol=1e-6)\n"
             "assert 'numpy' not in module.__all__ and not any(name.split('.')[0] == 'normfuse' for name in sys.modules)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NORMFUSE", "PYTHONPATH"))}
    done = subprocess.run([sys.executable, "-c", words], env=environment, cwd=repository, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- layers ---------------------------------------------------------------------------------------------------------

LAYERS = {
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (4, 6, 5, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (4, 6, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6, momentum=None), (4, 6, 5, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6, affine=False), (4, 6, 3, 3, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), (6, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, track_running_stats=True), (4, 6, 5, 5)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(6), (4, 6, 3, 3, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (4, 5, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-3), (4, 5, 6)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(6), (4, 6, 5, 5)),
}


@pytest.fixture
def mapped(kernels, repository):
    """PyTorch's classes, with the layers of this repository as what kernelize puts there; taken back afterwards."""
    mapping = {name: {kind: kernels.LocalLayerRepository(repository, layer_name=name) for kind in ("cpu", "cuda")}
               for name in LAYERS}
    for name in LAYERS:
        kernels.replace_kernel_forward_from_hub(getattr(nn, name), name)
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        yield kernels
    for name in LAYERS:
        del getattr(nn, name).kernel_layer_name, getattr(nn, name).kernel_condition


def kernelized(kernels, layer, mode):
    """A copy of the layer; it is what kernelize says that it is."""
    ours = kernels.kernelize(copy.deepcopy(layer), mode=mode, device=DEVICE, use_fallback=False)
    assert "_normfuse_" in ours.forward.__func__.__globals__["__name__"]
    return ours


def randomized(name):
    torch.manual_seed(len(name))
    make, shape = LAYERS[name]
    layer = make().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, torch.randn(shape, dtype=torch.float64)


def check_step(layer, ours, x):
    """Output and gradients of one step."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(input) for norm, input in zip((layer, ours), inputs)]
    assert torch.allclose(*outputs, rtol=1e-10, atol=1e-12)
    for output in outputs:
        output.square().mean().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_inference(mapped, name):
    layer, x = randomized(name)
    layer.eval()
    with torch.inference_mode():
        assert torch.allclose(kernelized(mapped, layer, mapped.Mode.INFERENCE)(x), layer(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_training(mapped, name):
    """Three steps: outputs, gradients and buffers. Stock's SyncBatchNorm does not train on the CPU: there a batch norm
    stands in for it."""
    layer, x = randomized(name)
    ours = kernelized(mapped, layer, mapped.Mode.TRAINING)
    if name == "SyncBatchNorm":
        layer = nn.BatchNorm2d(6).double()
        layer.load_state_dict(ours.state_dict())
    for _ in range(3):
        x = x * 1.5 + 1.0
        check_step(layer, ours, x)
    for (key, expected), value in zip(layer.state_dict().items(), ours.state_dict().values()):
        assert torch.allclose(value, expected, rtol=1e-10, atol=1e-12), key
    for expected, parameter in zip(layer.parameters(), ours.parameters()):
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["GroupNorm", "BatchNorm3d", "InstanceNorm2d", "LayerNorm", "RMSNorm"])
def test_torch_compile(mapped, name):
    """One graph, forward and backward."""
    layer, x = randomized(name)
    ours = torch.compile(kernelized(mapped, layer, mapped.Mode.TRAINING | mapped.Mode.TORCH_COMPILE), fullgraph=True)
    check_step(layer, ours, x)


@pytest.mark.parametrize("layer", [nn.LayerNorm((5, 6)), nn.RMSNorm((5, 6), eps=1e-3), nn.RMSNorm(6)], ids=str)
def test_other_norms_of_last_axes(mapped, layer):
    """Over several axes, or with an eps that depends on the type, a norm is PyTorch's own."""
    layer, x = layer.to(DEVICE), torch.randn(4, 5, 6)
    assert torch.equal(kernelized(mapped, layer, mapped.Mode.INFERENCE)(x), layer(x))


def test_checkpoint_counts_once(mapped):
    """A batch that torch.utils.checkpoint recomputes moves the running statistics once."""
    layer, x = randomized("BatchNorm1d")
    ours = [kernelized(mapped, layer, mapped.Mode.TRAINING) for _ in range(2)]
    x.requires_grad_()
    torch.utils.checkpoint.checkpoint(ours[0], x, use_reentrant=False).sum().backward()
    ours[1](x).sum().backward()
    for key, value in ours[1].state_dict().items():
        assert torch.equal(ours[0].state_dict()[key], value), key


def test_refusals(mapped):
    """In stock's words."""
    ours = kernelized(mapped, nn.BatchNorm2d(6), mapped.Mode.TRAINING)
    with pytest.raises(ValueError, match="expected 4D input"):
        ours(torch.randn(4, 6, 5))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours(torch.randn(1, 6, 1, 1))
