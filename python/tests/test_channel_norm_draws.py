# SPDX-License-Identifier: MIT
"""Random problems of normfuse.torch.channel_norm: every value and gradient is within the bounds of docs/numerics.md of
the formula in f64, and, of f64 inputs, near what torch's autograd makes of a formula of torch's.

NORMFUSE_RANDOM_PROBLEMS=2000 NORMFUSE_RANDOM_SEED=1 python -m pytest python/tests/test_channel_norm_draws.py draws that
many; a problem that fails is drawn alone by its number: NORMFUSE_RANDOM_SEED=number NORMFUSE_RANDOM_PROBLEMS=1."""
import os

import numpy
import pytest

torch = pytest.importorskip("torch")

import normfuse.torch as nft  # noqa: E402
import reference  # noqa: E402
from device import DEVICE  # noqa: E402
from normfuse.torch import functional  # noqa: E402
from normfuse.torch._operators import Y_DTYPES, ops  # noqa: E402
from test_channel_norm import LAYOUTS, PAIRS, stock  # noqa: E402
from test_functional import NAMES, sum_of  # noqa: E402

SEED = int(os.environ.get("NORMFUSE_RANDOM_SEED", "1"))
COUNT = int(os.environ.get("NORMFUSE_RANDOM_PROBLEMS", "80"))
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = [None, "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6", "prelu"]


class Draw:
    def __init__(self, number):
        self.random = numpy.random.default_rng([number, 5])
        draw = self.draw
        self.groups = draw([1, 1, 1, 2, 5])
        channels = self.groups * draw([1, 2, 3, 8, 40, 150])
        axes = int(self.random.integers(0, 5))
        self.shape = (int(self.random.integers(1, 4)), channels, *(int(n) for n in self.random.integers(1, 7, axes)))
        self.dtype, self.of_y = draw(PAIRS)
        self.words = {"groups": self.groups, "statistics": draw(["mean_and_variance", "mean_square"]),
                      "eps_kind": draw(["added", "of_norm"]), "eps": draw([1e-12, 1e-6, 1e-5, 0.1, 3.0]),
                      "activation": draw(ACTIVATIONS)}
        self.words["act_param"] = {"leaky_relu": 0.25,
                                   "elu": 0.75}.get(self.words["activation"]) if draw([0, 1]) else None
        center, n = draw([0.0, 0.25, 30.0]), self.shape[0]
        self.tensors = {"input": self.big(self.dtype, center)}
        for name, size in (("weight", (channels,)), ("bias", (channels,)), ("scale", (n, channels)),
                           ("shift", (n, channels)), ("pre_bias", draw([(channels,), (n, channels)]))):
            if draw([False, True]):
                self.tensors[name] = self.values(size, 0.4, 0.3 + (name == "weight")).to(draw(DTYPES))
        for name, dtype in (("pre_add", self.dtype), ("post_add", self.of_y)):
            if draw([False, False, True]):
                self.tensors[name] = self.big(dtype)
        if self.words["activation"] == "prelu":
            self.tensors["slope"] = self.values((draw([1, channels]),), 0.3, 0.2).to(draw(DTYPES))
        self.return_sum = draw([False, True]) and ("pre_add" in self.tensors or "pre_bias" in self.tensors)
        self.channels_last, self.last = draw([False, False, True]), draw([False, True]) and axes > 0
        self.dy, self.du = self.big(self.of_y), self.big(self.dtype)

    def draw(self, choices):
        return choices[self.random.integers(len(choices))]

    def values(self, size, spread=1.0, center=0.0):
        return torch.from_numpy(center + spread * self.random.standard_normal(size)).to(DEVICE)

    def big(self, dtype, center=0.0):
        made = self.values(self.shape, 1.0, center).to(dtype)
        return LAYOUTS[self.draw(list(LAYOUTS))](made) if len(self.shape) > 2 else made

    def __str__(self):
        given = {name: (tuple(t.shape), t.dtype, t.stride()) for name, t in self.tensors.items()}
        return f"{given} {self.words} y {self.of_y}, u {self.return_sum}, dim {-1 if self.last else 1}"

    def problem(self):
        def wide(name, big=False):
            t = self.tensors.get(name)
            t = None if t is None else t.detach().double().cpu().numpy()
            return t if t is None or not big else t.reshape(*t.shape[:2], -1)

        words = {name: self.words[name] for name in ("groups", "statistics", "eps", "eps_kind", "act_param")}
        x = self.tensors["input"]
        return reference.Problem(
            "channel", NAMES[self.dtype], wide("input", True), **words,
            activation=self.words["activation"] or "identity",
            columns=len(self.shape) > 2 and x.movedim(1, -1).stride(-1) == 1 and x.shape[1] > 1,
            **{name: wide(name) for name in ("weight", "bias", "scale", "shift", "pre_bias", "slope")},
            pre_add=wide("pre_add", True), post_add=wide("post_add", True), writes_u=self.return_sum)

    def run(self):
        """y, u or None, and the gradients of all tensors."""
        leaves = {name: t.detach().requires_grad_() for name, t in self.tensors.items()}
        given, dim = dict(leaves), 1
        if self.last:  # as tokens
            dim = -1
            given = {name: t.movedim(1, -1) if name in ("input", "pre_add", "post_add") else t for name,
                     t in given.items()}
        results = nft.channel_norm(**given, **self.words, dim=dim, return_sum=self.return_sum,
                                   dtype=self.of_y, channels_last=self.channels_last)
        results = results if self.return_sum else (results,)
        results = tuple(r.movedim(-1, 1) for r in results) if self.last else results
        directions = (self.dy, self.du)[:len(results)]
        return *results, *(() if self.return_sum else (None,)), dict(zip(leaves, torch.autograd.grad(
            results, list(leaves.values()), directions)))

    def sum(self):
        """u before it is rounded, of a pre_bias that is read in the compute type."""
        u, pre_bias = self.tensors["input"].double(), self.tensors.get("pre_bias")
        if pre_bias is not None:
            pre_bias = pre_bias if self.dtype == torch.float64 else pre_bias.float()
            u = u + pre_bias.double().reshape(-1, u.shape[1], *[1] * (u.dim() - 2))
        u = u + self.tensors["pre_add"].double() if "pre_add" in self.tensors else u
        return u.cpu().numpy()

    def saved(self):
        """u, mean and rstd."""
        given = [self.tensors.get(name)
                 for name in ("input", "weight", "bias", "scale", "shift", "pre_bias", "pre_add")]
        words = self.words
        adds = "pre_add" in self.tensors or "pre_bias" in self.tensors
        _, u, mean, rstd = ops.channel_norm(
            *given, None, None, self.groups, words["eps"], functional.STATISTICS[words["statistics"]],
            functional.EPS_KINDS[words["eps_kind"]], 0, 0.0, 0, False, adds)
        return [None if t.dim() == 1 else t.double().cpu().numpy() for t in (u, mean, rstd)]


def check(name, got, want, dtype):
    """But where the bound reaches beyond the largest number of the type: a norm of nothing, clamped at a tiny eps."""
    values, error = want
    got = got.detach().double().cpu().numpy().reshape(numpy.shape(values))
    told = abs(values) + error < reference.LARGEST[NAMES[dtype]]
    reference.compare(name, got[told], values[told], numpy.broadcast_to(error, told.shape)[told], NAMES[dtype])


@pytest.mark.parametrize("number", range(SEED, SEED + COUNT))
def test_draw(number):
    made = Draw(number)
    y, u, gradients = made.run()
    problem = made.problem()
    try:
        assert y.dtype == made.of_y and y.shape == made.shape
        if made.channels_last:
            assert y.movedim(1, -1).is_contiguous()
        written, *statistics = made.saved()
        if written is not None:
            exact = made.sum()
            unit = reference.DOUBLE if made.dtype == torch.float64 else reference.UNIT["float32"]
            # added, then rounded
            check("u", torch.from_numpy(written), (exact, 4 * unit * (abs(exact) + 1)), made.dtype)
            problem.u = written.reshape(problem.x.shape)  # a sum near the middle of two numbers is either of them
            assert u is None or torch.equal(u.double().cpu(), torch.from_numpy(written))
        want = reference.forward(problem)
        check("y", y, want["y"], made.of_y)
        if made.words["activation"] == "relu6" and made.of_y.itemsize == 2 and "post_add" in made.tensors:
            return  # the derivative is made of y, and what is rounded to 6 has that of 6
        du = made.du.double().cpu().numpy().reshape(problem.x.shape) if made.return_sum else None
        wants = reference.backward(problem, made.dy.double().cpu().numpy().reshape(problem.x.shape), *statistics, du)
        for name, got in gradients.items():
            leaf = made.tensors[name]
            assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape)
            key = {"input": "dx", "pre_add": "dx"}.get(name, "d" + name)
            if name == "pre_bias" and not gradients["input"].isfinite().all():
                continue
            check(key, got, sum_of(gradients["input"], got) if name == "pre_bias" else wants[key], leaf.dtype)
        if made.dtype == torch.float64 and all(t.dtype == torch.float64 for t in made.tensors.values()):
            leaves = {name: t.detach().requires_grad_() for name, t in made.tensors.items()}
            words = {**made.words}
            if words.pop("act_param") is None and words["activation"] in ("leaky_relu", "elu"):
                return  # stock() has other parameters
            z, _ = stock(leaves["input"], **{name: t for name, t in leaves.items() if name != "input"}, **words)
            torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9)
    except AssertionError as error:
        raise AssertionError(f"problem {number}: {made}: {error}") from None


def test_draws_reach_every_type():
    made = [Draw(number) for number in range(400)]
    assert {(d.dtype, d.of_y) for d in made} == set(PAIRS) and len(Y_DTYPES) == 4
    assert {d.words["activation"] for d in made} == set(ACTIVATIONS)
