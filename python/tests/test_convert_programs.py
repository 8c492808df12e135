# SPDX-License-Identifier: MIT
"""Random programs, converted: whatever Python a forward holds, the converted model does what stock's does.

Each program is a file of its own: a model with a base class and a child, whose forwards are random statements on f64
tensors. Compared are outputs, gradients, running statistics, and what the program logs, prints, warns of and raises,
with the line of the file: of two training steps and of evaluation, then again after a random change of the model or of
its class. A share is compiled, too.

Not in them is what a checkpoint does to running statistics, where convert means to differ; writes to activations, weights
and statistics that autograd does not see (`.data`), since a fused call computes from its input in the backward what
stock's activation keeps; `_version`, which is 0 where a call replaced an activation in place; and mixed types, which
stock's norms refuse and ours take. What a norm itself raises may be of a later line.

NORMFUSE_RANDOM_PROGRAMS: how many; NORMFUSE_RANDOM_SEED: the first one's seed; NORMFUSE_FAILURES: a folder for programs
that differ, made short. Such a file runs by itself, with this folder on the path.
"""
import collections
import contextlib
import copy
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import math
import os
import pathlib
import random
import sys
import textwrap
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")
import normfuse.torch as nft  # noqa: E402

PRELUDE = '''
import contextlib
import contextvars
import functools
import itertools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

LOG = []
GAIN = 1.25
CALLS = 0
MODE = contextvars.ContextVar("mode", default=1)


def log(*values):
    LOG.append([v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values])


def double(x):
    return x * 2


class Overwrites(nn.Module):
    def forward(self, x):
        return x.mul_(1.25)


class Wrapper(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, factor=1):
        return self.body(x) * factor


class Counted:
    """A descriptor that writes."""

    def __get__(self, model, kind=None):
        model.calls += 1
        return 1 + model.calls * 0.125


class Layers(nn.Module):
    gain, kind = 1.5, "a"
    counted = Counted()

    def __init__(self):
        super().__init__()
        self.conv0, self.conv1 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn0, self.bn1, self.gn = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.inst = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.relu, self.relu_, self.silu = nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU()
        self.leaky, self.prelu, self.slope = nn.LeakyReLU(0.2), nn.PReLU(4), nn.Parameter(torch.full((1,), 0.3))
        self.nothing, self.drop, self.over = nn.Identity(), nn.Dropout(0.3), Overwrites()
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.ends = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.shared = nn.Sequential(nn.Identity(), self.bn0)
        self.whole = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4))
        self.wrapped = Wrapper(nn.Sequential(self.conv1, nn.Dropout(0.3), self.bn1))
        self.chain = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.SiLU()])
        self.by_name = nn.ModuleDict({"norm": nn.BatchNorm2d(4), "act": nn.ReLU()})
        self.flag, self.factor, self.fail, self.kept, self.calls = True, 0.75, False, None, 0
        self.table, self.seen, self.counter = {3: 1.5}, [], itertools.count(1)
        for tensor in itertools.chain(self.parameters(), self.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.3, 1.2)

    @property
    def scaled(self):
        return self.factor * 2

    @property
    def statistics(self):
        self.bn0.num_batches_tracked.add_(5)
        return float(self.bn0.num_batches_tracked) * 0.01

    @contextlib.contextmanager
    def entered(self, name):
        log("enter", name)
        try:
            yield self
        finally:
            log("leave", name)

    def raises(self, x):
        if x.dim() == 4:
            raise ValueError("program raises")
        return x

    def gate(self, x, y):
        return self.silu(self.gn(x) + y)

    def touch(self, x):
        self.seen.append(tuple(x.shape))
        return x

    def items(self):
        yield from self.chain
'''

FILE = '''

class Child(Layers):
{child_helpers}
    def forward(self, x):
{child}


class Base(Layers):
    def __init__(self):
        super().__init__()
        self.child = Child()

{base_helpers}
    def forward(self, x):
{base}


class Random(Base):
    def forward(self, x):
{forward}


def other_forward(self, x):
    return self.relu(self.gn(x)) * self.factor


def change(model):
{change}


if __name__ == "__main__":
    import test_convert_programs

    test_convert_programs.show(__file__)
'''

NORMS = ["self.bn0({})", "self.bn1({})", "self.gn({})", "self.inst({})", "self.ends({})", "self.shared({})",
         "self.wrapped({})", "self.chain[1]({})", "self.by_name['norm']({})", "self.bn0(self.conv0({}))",
         "self.gn(self.conv1({}))", "F.batch_norm({}, None, None, self.bn0.weight, self.bn0.bias, True)",
         "F.group_norm({}, 2)", "self.bn0(input={})", "self.bn1.forward({})"]
ACTIVATIONS = ["self.relu({})", "self.relu_({})", "self.silu({})", "self.leaky({})", "self.prelu({})", "F.relu({})",
               "F.relu({}, inplace=True)", "F.silu({})", "F.leaky_relu({}, 0.1)", "F.gelu({}, approximate='tanh')",
               "F.prelu({}, self.slope)", "{}.relu()", "torch.relu({})", "self.relu(self.drop({}))", "{}.relu_()",
               "self.by_name['act']({})", "self.chain[2]({})", "F.hardswish({})", "self.nothing(self.relu({}))",
               "F.relu6(input={})"]
OTHERS = ["self.conv0({})", "self.conv1({})", "self.pool({})", "self.nothing({})", "self.drop({})", "self.over({} * 1)",
          "torch.tanh({})", "{} * 1.5", "{}.clone()", "{}", "{}.detach()", "{}.view(2, 4, 3, 3)", "{}.contiguous()",
          "double({})", "self.touch({})", "self.whole({})", "{0} + {0}.mean((2, 3), keepdim=True)",
          "{0} * (1 + {0}.mean((2, 3), keepdim=True)) + {0}.amax((2, 3), keepdim=True)", "{} / 1.0",
          "{} * torch.rand(1, dtype=torch.float64)", "F.dropout({}, 0.2, self.training)", "self.child({})",
          "torch.cat([{0}[:, :2], {0}[:, 2:]], 1)", "torch.chunk(torch.cat([{0}, {0}]), 2)[0]", "{} * GAIN",
          "{} * self.gain", "{} * type(self).gain", "{} * self.scaled", "{} * self.counted", "{} * MODE.get()",
          "{} + next(self.counter)", "{} * self.table[3]", "{} * self.statistics", "self.wrapped({}, 0.5)",
          "{} * self.bn0.running_mean.view(1, 4, 1, 1)", "getattr(self, 'conv0')({})", "functools.partial(double)({})",
          "{}.permute(0, 1, 3, 2)", "{0}.where({0} > 0, {0} * 0.5)"]
QUESTIONS = ["isinstance({}, torch.Tensor)", "type({}) is torch.Tensor", "torch.is_tensor({})", "hasattr({}, 'mask')",
             "getattr({}, 'mask', None) is None", "hasattr({}, 'grad_fn')",
             "{}.dtype in {{torch.float64, torch.float32}}", "{}.dtype == torch.float64", "str({}.device) == 'cpu'",
             "{}.device.type == 'cuda'", "{0} is {1}", "{0} is not {1}", "id({0}) == id({1})", "{}.requires_grad",
             "{}.is_contiguous()", "{}.shape[1] == 4", "isinstance({}.shape[2], int)",
             "{}.dim() == 4 and len({0}) == 2", "torch.is_grad_enabled()", "self.training", "self.flag",
             "{0}.data_ptr() == {1}.data_ptr()", "bool(({} > 0).any())", "float({}.sum()) > 0", "{} is None",
             "self.kind == 'a'", "isinstance(self, Layers)", "callable({})", "{}.is_leaf",
             "{0} in (1, None)", "self.bn0.training", "'{}' in dir()", "isinstance({}, (list, tuple))",
             "{0}.equal({1})", "{}.numel() > 3", "issubclass(type({}), torch.Tensor)", "len(self.seen) > 1",
             "self.kept is not None", "{}.stride(1) == 9", "not {}.is_floating_point()"]
IN_PLACE = ["{0} += {1}", "{0}.mul_(1.25)", "{0}.add_({1})", "{0} *= 0.5", "{0}[0] = 0", "{0}.zero_()",
            "{0}.clamp_(min=-1)", "torch.add({1}, 1, out={0}.detach())", "self.relu_({0})", "self.over({0})",
            "{0}.view(-1).add_(0.5)", "{0}.copy_({1})", "{0}.relu_()", "F.relu_({0})", "F.relu({0}, inplace=True)",
            "F.leaky_relu({0}, 0.1, True)", "self.relu({0})"]
EFFECTS = ["log('sum', {}.sum())", "log('type', type({}).__name__, tuple({}.shape))",
           "self.seen.append(float({}.sum()))", "print('program', tuple({}.shape))", "warnings.warn('program warns')",
           "self.calls += 1", "self.kept = {}", "self.table[3] = 1.5 + 0.125 * self.calls", "log(next(self.counter))",
           "self.bn0.momentum = 0.3", "assert {}.dim() == 4", "log(f'{{float({}.mean()):.4f}}')",
           "{0}.retain_grad() if {0}.requires_grad else None", "log(self.bn0.running_mean)",
           "log(int(self.bn0.num_batches_tracked))", "CALLS += 1",
           "warnings.warn('program warns of its caller', stacklevel=2)", "log(torch.is_grad_enabled())",
           "log(repr({}.shape))", "self.chain[1].running_mean.mul_(0.5)", "setattr(self, 'factor', 0.5)",
           "log(CALLS, GAIN, MODE.get())", "log(str(self.relu))", "log(sorted(locals()))",
           "log(type(self.bn0).__name__)", "log(torch.rand(1))"]

# Statements by their weights. In a text a and b are variables, y is one that is assigned, p and q are new; norm_a and
# act_a are calls of a norm and of an activation, of a or of what else is named so; and written is a statement or none.
ALIASES = ["{y} = {a}", "{y} = {a}.view(2, 4, 3, 3)", "{y} = {a}.detach()", "{y} = {a}[:]", "{y} = ({a},)[0]",
           "{y} = [{a}].pop()", "{y} = {a}.transpose(2, 3)"]
FORMS = [
    (2, ["{y} = sum([{act_a} * i for i in range(1, 3)])", "{y} = sum({act_a} for _ in range(2))",
         "{y} = [layer({a}) for layer in (self.bn0, self.relu)][-1]", "{y} = {{k: {act_a} for k in 'ab'}}['a']",
         "{y} = [t for t in ({a}, {b}) if t is not None][0]", "{y} = torch.stack([{act_a}, {b}]).sum(0)",
         "{y} = functools.reduce(lambda t, layer: layer(t), self.chain, {a})",
         "{y} = sum(map(self.relu, ({a}, {b})))", "{y} = next(t for t in [{act_a}])",
         "{y} = max([{a}, {a}], key=id) * 1", "{y} = (lambda t: self.relu(t))({a})",
         "{y} = torch.cat([*[{act_a}], {b}])[:2]", "{y} = dict(y={act_a})['y']"]),
    (2, ["if ({p} := {norm_a}) is not None:\n    {b} = {act_p}", "{b} = {act_norm} + {p}",
         "{p} = {norm_a}\n{b} = {act_p}\nflag = {b}.dim() == 3 and ({p} := {b})\n{b} = {b} + {p}",
         "while ({p} := {norm_a}) is None:\n    pass\n{b} = {act_p}"]),
    (2, ALIASES),
    (1, ["{y} = checkpoint(self.gn, {a}, use_reentrant=False)",
         "{y} = checkpoint(self.gate, {a}, {b}, use_reentrant=False)",
         "{y} = checkpoint(lambda t: self.relu(self.gn(t)), {a}, use_reentrant=False)"]),
    (1, ["if {question} and self.fail:\n    return {act_a}"]),
    (1.2, ["{y} = {act_a} if {question} else {a}", "{y} = (self.flag and {act_a}) + {a}",
           "{y} = ({a} if self.kept is None else {a} * 2)",
           "{y} = {{True: self.relu, False: self.silu}}[self.flag]({a})",
           "{y} = ({norm_a}, {b})[0]", "{y} = self.relu({{'y': {norm_a}}}['y'])"]),
    (0.8, ["{p}, {q} = {norm_a}, {a}", "{p} = {q} = {norm_a}", "({p}), [{q}] = {a}, [{norm_a}]",
           "{p}, {q} = {norm_a}, {norm_b}\n{p} = self.relu({p}) + self.silu({q})",
           "{p}, *{q} = {norm_a}, {a}\n{q} = {q}[0]"]),
    (1, ["self.training", "self.kept = None", "del self.seen[:]", "self.seen.clear()", "self.flag = not self.flag",
         "if self.fail:\n    raise KeyError('program')", "if self.calls > 4:\n    raise RuntimeError('program ends')"]),
]
NESTED = ["def {f}(t):\n    t = {norm_t}\n    return {act_t} * {a}\n{written}\n{y} = {f}({b})",
          "{f} = lambda t: {act_t} + {a}\n{written}\n{y} = {f}({b})",
          "{f} = lambda t, y={a}: {act_y} + t\n{written}\n{y} = {f}({b})",
          "def {f}(t, y={a}):\n    return y + t\n{written}\n{y} = {f}({b})",
          "def {f}(t):\n    nonlocal {a}\n    {a} = t * 2\n    return {norm_a}\n{written}\n{y} = {f}({b})"]


class Generator:
    def __init__(self, rng, depth=0, in_child=False):
        self.rng, self.depth, self.in_child = rng, depth, in_child
        self.names, self.count = ["x"], 0

    def any(self):
        return self.rng.choice(self.names[-3:]) if self.rng.random() < 0.7 else self.rng.choice(self.names)

    def fresh(self):
        self.count += 1
        return f"v{self.count}"

    def name(self):
        """One that is assigned: often new."""
        if self.rng.random() < 0.3:
            return self.rng.choice(self.names)
        return self.fresh()

    def fill(self, texts):
        text = self.rng.choice(texts)
        while self.in_child and "child" in text:
            text = self.rng.choice(texts)
        return text.replace("{}", "{0}").format(self.any(), self.any())

    def known(self, name):
        if name in self.names:
            self.names.remove(name)
        self.names.append(name)

    def assign(self, text, name=None):
        name = name or self.name()
        self.known(name)
        return [f"{name} = {text}"]

    def block(self, least=1, most=2):
        """Indented statements, whose new names nobody sees afterwards."""
        names, self.depth = list(self.names), self.depth + 1
        lines = [line for _ in range(self.rng.randint(least, most)) for line in self.statement()]
        self.names, self.depth = names, self.depth - 1
        return indented(lines or ["pass"])

    def written(self):
        """An assignment to a name that there is already."""
        return [f"{self.rng.choice(self.names)} = {self.fill(ACTIVATIONS + OTHERS + NORMS)}"]

    def statement(self):
        kinds = [(14, self.fold), (6, self.other), (2, self.in_place), (5, self.effect)]
        if self.depth < 2:
            kinds += [(5, self.question), (3, self.context), (3, self.attempt), (4, self.loop),
                      (3, lambda: self.form(NESTED))]
        kinds += [(3, self.helper), (2, self.hooked), (2, self.statistics)]
        kinds += [(weight, functools.partial(self.form, texts)) for weight, texts in FORMS]
        weights, functions = zip(*kinds)
        return self.rng.choices(functions, weights)[0]()

    # ---- statements: each gives lines ----

    def fold(self):
        """A norm, what may be between, an activation."""
        lines, rng = [], self.rng
        y = self.fresh()
        lines += self.assign(self.fill(NORMS), y)
        for _ in range(rng.choice([0, 0, 0, 1])):
            lines += rng.choice([self.other, self.effect, self.in_place, lambda: self.form(ALIASES)])()
        if rng.random() < 0.5:
            sums = ["{0} = {0} + {1}", "{0} += {1}", "{0} = {1} + {0}", "{0} = torch.add({0}, {1})",
                    "{0} = {0}.add({1})",
                    "{0} = {0} * (1 + {1}.mean((2, 3), keepdim=True)) + {1}.amax((2, 3), keepdim=True)",
                    "{0} = {0} - {1}", "{0} = {0} + {1}.mean((2, 3), keepdim=True)", "{0} = {0} + {1}.float()"]
            lines.append(rng.choice(sums).format(y, self.any()))
        for _ in range(rng.choice([0, 0, 0, 1])):
            lines += rng.choice([self.other, self.effect, self.in_place, self.question])() if self.depth < 2 else []
        self.known(y)
        if rng.random() < 0.1:
            return lines + [rng.choice(["{}.relu_()", "F.relu_({})", "F.relu({}, inplace=True)", "self.relu_({})",
                                        "self.relu({})"]).format(y)]
        return lines + self.assign(rng.choice(ACTIVATIONS).format(y), y if rng.random() < 0.75 else None)

    def other(self):
        return self.assign(self.fill(OTHERS))

    def in_place(self):
        line = self.fill(IN_PLACE)
        return [line] if self.rng.random() < 0.3 else [f"with torch.no_grad():\n    {line}"]

    def effect(self):
        return self.fill(EFFECTS).split("\n")

    def question(self):
        test = self.fill(QUESTIONS)
        if self.rng.random() < 0.3:
            test = f"{test} {self.rng.choice(['and', 'or'])} {self.fill(QUESTIONS)}"
        lines = [f"if {test}:"] + indented(self.written()) + (self.block(0, 1) if self.rng.random() < 0.3 else [])
        if self.rng.random() < 0.6:
            lines += ["else:"] + (indented(self.written()) if self.rng.random() < 0.6 else self.block())
        return lines

    def failing(self):
        """A norm that raises, or does not, before its activation."""
        y, z = self.rng.choice(self.names), self.rng.choice(self.names)
        norm = self.rng.choice(["self.bn0({}[0])", "self.bn1({}[:, :3])", "self.gn({}[:, :3])", "self.bn0({})"])
        act = self.rng.choice(ACTIVATIONS).format(y)
        return indented([f"{y} = {norm.format(self.any())}", *self.rng.choice([[], [f"{z} = torch.tanh(x)"]]),
                         f"{self.rng.choice([y, z])} = {act}"])

    def context(self):
        contexts = ["torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(self.flag)", "self.entered('a')",
                    "contextlib.suppress(ValueError)", "contextlib.nullcontext()",
                    "torch.autocast('cpu', enabled=False)",
                    "torch.autograd.profiler.record_function('part')", "self.entered('a'), self.entered('b')",
                    "torch.random.fork_rng()"]
        chosen = self.rng.choice(contexts)
        return [f"with {chosen}:"] + indented(self.written()) + self.block(0, 2) + (
            indented(["self.raises(x)"]) if self.rng.random() < 0.15 else []) + (
            self.failing() if "suppress" in chosen else [])

    def attempt(self):
        rng = self.rng
        lines = ["try:"] + (indented(self.written()) if rng.random() < 0.5 else self.failing()) + self.block(0, 1)
        if rng.random() < 0.6:
            lines += indented([rng.choice(["self.raises(x)", "raise ValueError('program')", "x[9]",
                                           "self.conv0(x[:, :3])", "assert not self.flag",
                                           "if self.fail:\n    raise KeyError('program')"])])
            lines += indented(self.written())
        lines += [f"except {rng.choice(['Exception', '(ValueError, IndexError) as error', 'RuntimeError'])}:"]
        lines += indented(self.written())
        if rng.random() < 0.3:
            lines += ["else:"] + indented(self.written())
        if rng.random() < 0.5:
            lines += ["finally:"] + indented(self.rng.choice([self.written, self.effect])())
        return lines

    def loop(self):
        rng = self.rng
        head = rng.choice(["for i in range({n}):", "for layer in self.chain:", "for layer in self.items():",
                           "for i, layer in enumerate(self.whole):", "for t in ({a}, {b}):", "while self.calls < 3:",
                           "for t in iter([{a}, {b}]):", "for t, i in zip([{a}, {b}], range(2)):",
                           "for _ in itertools.repeat(None, 2):"])
        y = rng.choice(self.names)
        lines = [head.format(n=rng.randint(0, 3), a=self.any(), b=self.any())]
        if head.startswith("while"):
            lines += ["    self.calls += 1"]
        if "layer" in head:
            lines += [f"    {y} = layer({y})"]
        if " t" in head:
            lines += [f"    {y} = {self.rng.choice(ACTIVATIONS + NORMS).format('t')}"]
        lines += indented(self.written()) + (self.block(0, 1) if rng.random() < 0.5 else [])
        if rng.random() < 0.25:
            lines += indented([f"if {self.fill(QUESTIONS)}:\n    {rng.choice(['break', 'continue'])}"])
            lines += indented(self.written())
        if rng.random() < 0.15:
            lines += ["else:"] + indented(self.written())
        return lines

    def form(self, texts):
        rng, text = self.rng, self.rng.choice(texts)
        names = {"a": self.any(), "b": self.any(), "y": self.name(), "p": self.fresh(), "q": self.fresh()}
        words = {**names, "f": f"f{self.depth}", "question": self.fill(QUESTIONS),
                 "written": self.written()[0] if rng.random() < 0.5 else "pass"}
        for name in (*names, "t"):
            variable = "y" if name == "y" else names.get(name, name)  # y: an argument of a lambda
            words[f"norm_{name}"] = rng.choice(NORMS).format(variable)
            words[f"act_{name}"] = rng.choice(ACTIVATIONS).format(variable)
        words["act_norm"] = rng.choice(ACTIVATIONS).format(f"({words['p']} := {words['norm_a']})")
        for name in "ypq":
            if f"{{{name}}}" in text:
                self.known(names[name])
        return text.format(**words).split("\n")

    def helper(self):
        forms = ["self.helper({})", "self.both({}, {})", "self.both({}, y={})", "self.part({})", "super().forward({})",
                 "self.helper(self.bn0({}))", "self.child({})", "Base.helper(self, {})", "self.whole({})",
                 "self.relu(self.child({}))", "self.child(self.bn0({}))", "self.relu(self.ends({}) + {})"]
        if self.in_child:
            forms = ["self.both({}, {})", "self.whole({})", "self.relu(self.ends({}) + {})"]
            if self.in_child != "helper":
                forms.append("self.helper({})")
        return self.assign(self.fill(forms))

    def hooked(self):
        y, rng = self.any(), self.rng
        if rng.random() < 0.25:
            # PyTorch crashes at a hook of a view that was overwritten without gradients.
            return [f"if {y}.requires_grad and not {y}._is_view():", f"    {y}.register_hook(lambda g: g * 1.5)"]
        before, after = rng.choice([
            ("handle = self.relu.register_forward_hook(lambda m, i, o: o * 1.5)", "handle.remove()"),
            ("handle = self.bn0.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))", "handle.remove()"),
            ("token = MODE.set(2)", "MODE.reset(token)")])
        return [before, *self.fold(), after]

    def statistics(self):
        y, z = self.fresh(), self.any()
        middle = ["mean = self.bn0.running_mean.clone()", "mean = mean + 1", "mean = self.bn0.weight * 1",
                  "with torch.no_grad():\n    self.bn0.weight.mul_(1.25)", "self.bn0.running_var.mul_(1.25)",
                  "self.bn0.running_mean.add_(1)", "self.bn0.eval()", "self.bn0.num_batches_tracked.add_(1)",
                  "old, self.bn0 = self.bn0, nn.Identity()", "mean = self.bn0(x).mean((0, 2, 3))"]
        line = self.rng.choice(middle)
        lines = ["mean = self.bn0.running_mean", f"{y} = self.bn0({z})", line]
        lines += [f"{y} = {self.rng.choice(ACTIVATIONS).format(y)}"]
        lines += ["self.bn0.train(self.training)"] if "eval" in line else []
        lines += ["self.bn0 = old"] if "Identity" in line else []
        self.known(y)
        return lines + [f"{y} = {y} * mean.view(1, 4, 1, 1)"]


def indented(lines):
    return [textwrap.indent(line, "    ") for line in lines]


CHANGES = ["model.relu = nn.Tanh()", "model.relu = nn.SiLU()", "model.silu = nn.ReLU()", "model.bn0 = nn.Identity()",
           "model.bn0.register_forward_hook(lambda m, i, o: o * 1.5)",
           "model.relu.register_forward_hook(lambda m, i, o: o * 1.5)",
           "model.conv0.register_forward_hook(lambda m, i, o: o * 1.5)",
           "model.child.register_forward_hook(lambda m, i, o: o * 1.5)",
           "model.gn.register_forward_pre_hook(lambda m, i: (i[0] * 1.5,))", "model.factor = 3.0",
           "model.flag = not model.flag", "model.bn0.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))",
           "model.table = {3: 2.5}", "model.kept = 1", "Random.gain = 2.5", "Layers.gain = 2.5", "Layers.kind = 'b'",
           "Random.forward = other_forward", "model.fail = True", "Base.helper = lambda self, x: x * 3",
           "model.helper = lambda x: x * 3", "Child.forward = other_forward", "model.child.forward = lambda x: x * 3",
           "model.relu.forward = lambda x: x * 3", "model.bn0.forward = lambda x: x * 3", "globals().update(GAIN=2.5)",
           "globals().update(double=lambda x: x * 3)", "MODE.set(3)", "model.bn0.eps = 0.25",
           "model.bn0.momentum = None", "model.gn.num_groups = 4", "model.relu.inplace = True",
           "model.relu_.inplace = False", "model.leaky.negative_slope = 0.7", "model.drop.p = 0.0",
           "model.bn0.requires_grad_(False)", "model.conv0.bias = None", "model.bn0.weight = None",
           "model.bn0.track_running_stats = False", "model.relu.__class__ = nn.SiLU", "model.whole[2] = nn.Tanh()",
           "model.whole.append(nn.ReLU())", "model.chain[2] = nn.SiLU()", "del model.whole[2]",
           "model.bn0, model.bn1 = model.bn1, model.bn0", "model.ends[1] = nn.GroupNorm(2, 4).double()",
           "model.float()", "nn.utils.parametrizations.weight_norm(model.conv0)", "model.counter = itertools.count(5)",
           "model.gn.double()", "model.by_name['act'] = nn.Tanh()", "model.prelu = nn.PReLU(1).double()",
           "model.slope.data.fill_(0.9)", "Layers.scaled = property(lambda self: 7.0)",
           "Random.__call__ = lambda self, x: nn.Module.__call__(self, x) * 2",
           "nn.Module.register_forward_hook(model, lambda m, i, o: None)", "model.load_state_dict(model.state_dict())",
           "F.relu6 = F.relu6"]


def program(rng):
    """The parts of a file, each a list of statements."""
    def body(in_child, least, most):
        generator = Generator(rng, in_child=in_child)
        statements = ["\n".join(generator.statement()) for _ in range(rng.randint(least, most))]
        names = generator.names
        results = [names[-1], *rng.sample(names, min(len(names), rng.choice([0, 1, 1, 2])))]
        return statements, " + ".join(dict.fromkeys(results))

    parts = {}
    for name, in_child, size in (("child_helper", "helper", (1, 2)), ("child", True, (1, 3)),
                                 ("helper", "helper", (1, 2)), ("base", True, (1, 2)), ("forward", False, (1, 6))):
        parts[name], parts[name + "_result"] = body(in_child, *size)
    text = parts["forward_result"]
    first = text.split(" + ")[0]
    if rng.random() < 0.2:
        parts["forward_result"] = rng.choice([f"({text}, {first})", f"{{'a': {text}, 'b': {first}}}", f"[{text}]"])
    parts["change"] = [rng.choice(CHANGES) for _ in range(rng.choice([1, 1, 2]))]
    return parts


def write(parts, path):
    def text_of(name, spaces=8):
        lines = "\n".join(parts[name] or ["pass"])
        lines = f"global CALLS\n{lines}" if "CALLS += 1" in lines else lines
        return textwrap.indent(f"{lines}\nreturn {parts[name + '_result']}", " " * spaces)

    def helpers(name):
        return ("    def helper(self, x):\n" + text_of(name) + "\n\n"
                "    def both(self, x, y):\n        x = self.bn1(x) + y\n        return self.relu(x)\n\n"
                "    def part(self, x):\n        return self.bn0(x) * self.factor\n")

    path.write_text("# SPDX-License-Identifier: MIT" + PRELUDE + FILE.format(
        child_helpers=helpers("child_helper"), child=text_of("child"), base_helpers=helpers("helper"),
        base=text_of("base"), forward=text_of("forward"), change=textwrap.indent("\n".join(parts["change"]), "    ")))


def load(path):
    """A module of its own, whatever was loaded from that path before."""
    import linecache
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{next(_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_numbers = itertools.count()


# ---- what a program does ---------------------------------------------------------------------------------------------


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


OVERWRITTEN = "modified by an inplace operation"
MULTIPLE_VIEWS = "or another view of its base has been modified inplace"
MIXED = "mixed dtype (CPU)"  # of stock's norms
# Exceptions of norms that wait come maybe some lines later.
OF_NORMS = ("running_mean should contain", "divisible by num_groups", "expected 4D input")


def step(module, model, parts, x, training, gradients, seed):
    """One call: a list of (what, value). parts: the model's modules, and its parameters and buffers by name."""
    found, text, path = [], io.StringIO(), module.__file__
    modules, parameters, buffers = parts
    del module.LOG[:]
    for part in modules:
        part.__dict__["training"] = training
    for _, parameter in parameters:
        parameter.grad = None
    torch.default_generator.manual_seed(seed)
    x = x.clone().requires_grad_(gradients)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(text), \
            torch.set_grad_enabled(gradients):
        warnings.simplefilter("always")
        try:
            output = model(x * 1)
            tensors = tensors_of(output)
            found += [("type", type(output).__name__), *(("output", t.detach().clone()) for t in tensors)]
            if gradients:
                sum((t.to(x.dtype) * torch.linspace(-1, 1, t.numel(), dtype=x.dtype).view_as(t)).sum()
                    for t in tensors).backward()
                found += [("gradient of x", x.grad)]
                found += [(f"gradient of {name}", p.grad) for name, p in parameters]
        except Exception as error:
            lines = [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
            message = str(error).split("\n")[0]
            if any(refusal in str(error) for refusal in (OVERWRITTEN, MULTIPLE_VIEWS, MIXED)):
                message = OVERWRITTEN
            if any(words in message for words in OF_NORMS):
                lines = []
            found.append(("raised", (type(error).__name__, message, lines[-1:])))
    found += [(f"buffer {name}", b.clone()) for name, b in buffers]
    found += [("log", entry) for entry in module.LOG]
    found += [("printed", text.getvalue()), ("calls", (module.CALLS, model.calls)), ("seen", list(model.seen)),
              ("kept", model.kept.detach().clone() if isinstance(model.kept, torch.Tensor) else model.kept),
              ("counter", repr(model.counter)), ("random numbers", torch.rand(1)),
              ("flags", (model.flag, model.factor)), ("modes", [part.training for part in modules])]
    found += [("warned", (str(w.message), w.lineno, pathlib.Path(w.filename).name)) for w in warned
              if str(w.message).startswith("program")]
    return found


def run(module, model, x):
    """Two steps of training, and evaluation with gradients and without. A step that raises ends its kind."""
    module.CALLS = 0
    parts = list(model.modules()), sorted(model.named_parameters()), sorted(model.named_buffers())
    return [step(module, model, parts, x, training, gradients, seed)
            for training, gradients, seed in ((True, True, 1), (True, True, 2), (False, True, 3), (False, False, 4))]


def is_same(a, b, bound):
    """bound: gives the distance that is allowed."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and (
            torch.equal(a, b) or torch.allclose(a, b, rtol=1e-6, atol=bound(), equal_nan=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(v, w, bound) for v, w in zip(a, b))
    if isinstance(a, float):
        return a == b or math.isclose(a, b, rel_tol=bound(), abs_tol=bound()) or a != a and b != b
    return a == b


def difference(want, got, relative):
    """The first of what differs, or None."""
    for number, (a, b) in enumerate(zip(want, got)):
        # A value that cancels, as the gradient of a bias before a batch norm does, is as exact as the largest value.
        bound = functools.lru_cache(None)(lambda: relative * max([1.0, *(
            float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) for _, value in a
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel())]))
        for expected, found in itertools.zip_longest(a, b, fillvalue=("nothing", None)):
            if expected[0] != found[0] or not is_same(expected[1], found[1], bound):
                if expected[0] == "raised" and expected[1][1] == OVERWRITTEN or found[0] == "raised" and \
                        found[1][1] == OVERWRITTEN:
                    return None  # one keeps for the backward what the other does not
                return f"call {number}: {expected[0]} {expected[1]}, but {found[0]} {found[1]}"
    return None


@contextlib.contextmanager
def rounded(toward):
    """Norms whose results are rounded otherwise, in one direction: sums of them are 0 but for rounding."""
    def other(norm):
        def call(*args):
            y = norm(*args)
            size = y.detach().abs().amax() * 1e-15 * toward
            return y + size * torch.linspace(0.2, 1, y.numel(), dtype=y.dtype).view_as(y)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("batch_norm", "group_norm", "instance_norm"):
            patch.setattr(torch, name, other(getattr(torch, name)))
        yield


def both_runs(module, first, second, x, y, bound, context=contextlib.nullcontext):
    """How two models differ, before the change and after it: the second is given y, in a context. None where they do not,
    or where they have come apart because one overwrote what the other does not keep."""
    def run_second():
        with context():
            return run(module, second, y)

    want, got = run(module, first, x), run_second()
    found = difference(want, got, bound)
    if found is not None:
        return found
    if any(name == "raised" and value[1] == OVERWRITTEN for call in (*want, *got) for name, value in call):
        return None
    for model in (first, second):
        try:
            module.change(model)
        except Exception:
            return None  # stock's refuses it, or has no such thing
    if next(first.bn0.parameters(), x).dtype == torch.float32:
        x, y, bound = x.float(), y.float(), 2e-3
    found = difference(run(module, first, x), run_second(), bound)
    return None if found is None else f"after the change, {found}"


def stock_of(path):
    module = load(path)
    torch.manual_seed(0)
    return module, module.Random().double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)


def is_sensitive(path):
    """Does stock's own change as much where the input, or what its norms give, changes by a rounding? (The norm of a
    constant, for one.)"""
    for y, context in ((1 + 1e-13, contextlib.nullcontext), (1, lambda: rounded(1)), (1, lambda: rounded(-1))):
        module, stock, x = stock_of(path)
        if both_runs(module, stock, copy.deepcopy(stock), x, x * y, 1e-8, context) is not None:
            return True
    return False


def trial(path, compiled=False):
    """How a converted program differs from stock's, or None."""
    module, stock, x = stock_of(path)
    model = copy.deepcopy(stock)
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nft.convert(model)
    if not torch.equal(torch.get_rng_state(), random_state):
        return "convert drew random numbers"
    if module.LOG or module.CALLS or repr(model.counter) != repr(stock.counter) or model.calls or model.seen:
        return "convert ran the program"
    if compiled:
        return compiled_difference(module, stock, model, x)
    found = both_runs(module, stock, model, x, x, 1e-8)
    return None if found is None or is_sensitive(path) else found


def compiled_difference(module, stock, model, x):
    """Outputs and gradients where stock's compiles to what it gives uncompiled, and breaks of the graph where stock's has
    none."""
    torch._dynamo.reset()
    results, breaks = [], []
    for made in (stock, copy.deepcopy(stock), model):
        torch._dynamo.utils.counters.clear()
        call = made if made is stock else torch.compile(made, backend="aot_eager")
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                outputs = tensors_of(call(leaf * 1))
                sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in outputs).backward()
            results.append([[("output", t.detach()) for t in outputs], [("gradient", leaf.grad)],
                            [("gradient", p.grad) for p in made.parameters()],
                            [("buffer", b.clone()) for b in made.buffers()]])
        except Exception as error:
            results.append([[("raised", (type(error).__name__, str(error).split("\n")[0], []))]])
        breaks.append(list(torch._dynamo.utils.counters["graph_break"]))
    eager, theirs, ours = results
    if eager[0][0][0] == "raised" or difference(eager, theirs, 1e-8) is not None or len(theirs) != len(eager):
        return None
    found = difference(eager, ours, 1e-8) if len(ours) == len(eager) else f"it raises: {ours[0][0][1]}"
    if found is None and breaks[2] and not breaks[1]:
        found = f"its graph breaks: {breaks[2]}"
    return None if found is None else f"compiled, {found}"


def smaller(parts):
    """Parts, each without a piece of one."""
    for name in [name for name in parts if name + "_result" in parts and name != "forward"]:
        yield {**parts, name: [], name + "_result": "x"}
    for name in [name for name in parts if not name.endswith("_result")]:
        for i, statement in reversed(list(enumerate(parts[name]))):
            before, after, lines = parts[name][:i], parts[name][i + 1:], statement.split("\n")
            yield {**parts, name: before + after or (["pass"] if name == "change" else [])}
            for k in reversed(range(len(lines))):
                yield {**parts, name: [*before, "\n".join(lines[:k] + lines[k + 1:]), *after]}
    for name in [name for name in parts if name.endswith("_result")]:
        for term in parts[name].split(" + "):
            yield {**parts, name: term}


def shortened(parts, path, compiled):
    """Without the statements that the difference does not need."""
    def differs(candidate):
        """In more than a name that is not defined any more."""
        try:
            write(candidate, path)
            found = trial(path, compiled) or "NameError"
        except SyntaxError:
            return False
        return "NameError" not in found and "UnboundLocalError" not in found

    found = parts
    while found is not None:
        parts = found
        found = next((candidate for candidate in smaller(parts) if candidate != parts and differs(candidate)), None)
    write(parts, path)
    return parts


def show(path):
    """Prints how the program of a file differs."""
    path = pathlib.Path(path)
    print(trial(path) or trial(path, compiled=True) or "it does what stock's does")


def counted(function, found):
    """What notes calls that have an activation, an addition or a modulation in them."""
    names = list(inspect.signature(function).parameters)

    def call(*args, **options):
        given = dict(zip(names, args)) | options
        found["fused"] += any(given.get(name) is not None for name in ("activation", "post_add", "scale"))
        return function(*args, **options)

    return call


@pytest.fixture
def quick():
    """Half the time of a program is collecting garbage, and of tensors this small another half threads that wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


@contextlib.contextmanager
def counting(calls):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("group_norm", "batch_norm", "instance_norm", "group_norm_alone", "batch_norm_alone"):
            patch.setattr(nft.functional, name, counted(getattr(nft.functional, name), calls))
        yield


def test_random_programs(tmp_path, quick):
    count = int(os.environ.get("NORMFUSE_RANDOM_PROGRAMS", "180"))
    first = int(os.environ.get("NORMFUSE_RANDOM_SEED", "0"))
    kept = pathlib.Path(os.environ.get("NORMFUSE_FAILURES", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    failures, most = [], int(os.environ.get("NORMFUSE_MOST_FAILURES", "3"))
    fused = 0
    for number in range(first, first + count):
        parts = program(random.Random(number))
        path, compiled = tmp_path / f"program{number}.py", number % 100 == 99
        write(parts, path)
        calls = collections.Counter()
        # Dynamo breaks the graph where a checkpoint counts.
        with contextlib.nullcontext() if compiled else counting(calls):
            found = trial(path, compiled)
        fused += calls["fused"] > 0
        if found is not None:
            path = kept / f"program{number}.py"
            shortened(parts, path, compiled)
            failures.append(f"{path}: {trial(path, compiled)}")
            if len(failures) == most:
                break
        for name in [name for name in sys.modules if name.startswith(f"program{number}_")]:
            del sys.modules[name]
        if number % 25 == 0:
            gc.collect()
    assert not failures, "\n".join(failures)
    assert fused > count / 6, f"{fused} of {count} programs have anything fused"
