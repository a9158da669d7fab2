#!/usr/bin/python3
"""Compares what modelctl says of PyTorch checkpoints with what PyTorch itself says of them.

  tests/formats/torch_oracle.py MODELCTL

Writes checkpoints with torch.save, reads them back with torch.load, and compares the names, dtypes,
shapes, strides and bytes of all tensors with those of `MODELCTL inspect FILE -o json`; the bytes are
taken from the file, at the offset and with the strides that the index gives. What torch writes
beside plain tensors (whole modules, TorchScript, legacy files, quantized and sparse tensors) has to
be refused. The last line is "N passed, N failed"; exit code 77 when there is no PyTorch here.

Needs Debian's python3-torch (not python3-numpy).
"""
import json
import os
import subprocess
import sys
import tempfile
import warnings

try:
    import torch
except ImportError as error:
    print(f"skipped: PyTorch is not there for {sys.executable} ({error}); apt-get install python3-torch")
    sys.exit(77)

NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.complex128: "C128",
}
# Known to newer versions only.
for attribute, name in (("uint16", "U16"), ("uint32", "U32"), ("uint64", "U64"),
                        ("float8_e4m3fn", "F8_E4M3"), ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
                        ("float8_e5m2", "F8_E5M2"), ("float8_e5m2fnuz", "F8_E5M2FNUZ")):
    if hasattr(torch, attribute):
        NAMES[getattr(torch, attribute)] = name


def numbers(*shape, dtype=torch.float32):
    """Values that differ from each other where the type allows it."""
    count = 1
    for size in shape:
        count *= size
    values = torch.arange(count, dtype=torch.int64) % 97
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double()).to(dtype).reshape(shape)
    return (values % 2 == 1 if dtype == torch.bool else values.to(dtype)).reshape(shape)


def raw_elements(tensor):
    """The bytes of each element, in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    width = flat.element_size()
    storage = flat.storage()
    storage = storage.untyped() if hasattr(storage, "untyped") else storage._untyped()
    first = flat.storage_offset() * width
    data = bytes(storage[i] for i in range(first, first + flat.numel() * width))
    return [data[i:i + width] for i in range(0, len(data), width)]


def tensors_in(value, path=(), found=None):
    """{dotted path: tensor}, by the rules of the index."""
    found = {} if found is None else found
    if isinstance(value, torch.Tensor):
        found[".".join(path)] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, (str, int)):
                tensors_in(item, path + (str(key),), found)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            tensors_in(item, path + (str(i),), found)
    return found


def row_major(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


def elements_at(data, entry, width):
    """What the index says is there, element by element; nothing when its range does not hold them."""
    shape = entry["shape"]
    strides = entry.get("strides") or row_major(shape)
    out, places = [], [0]
    for size, stride in zip(shape, strides):
        places = [place + i * stride for place in places for i in range(size)]
    for place in places:
        at = entry["offset"] + place * width
        if not entry["offset"] <= at or at + width > entry["offset"] + entry["nbytes"]:
            return []
        out.append(data[at:at + width])
    return out


def inspect(modelctl, path):
    return subprocess.run([modelctl, "inspect", path, "-o", "json"], capture_output=True, text=True,
                          timeout=60, check=False)


def check_index(modelctl, path, value):
    """Texts of what differs."""
    run = inspect(modelctl, path)
    if run.returncode != 0:
        return [f"refused: {run.stderr.strip()}"]
    index = json.loads(run.stdout)
    listed = {entry["name"]: entry for entry in index["tensors"]}
    wanted = tensors_in(value)
    wrong = []
    if index["format"] != "torch":
        wrong.append(f"format {index['format']}")
    if sorted(listed) != sorted(wanted) or len(index["tensors"]) != len(wanted):
        return wrong + [f"names {sorted(listed)} instead of {sorted(wanted)}"]
    with open(path, "rb") as file:
        data = file.read()
    for name, tensor in wanted.items():
        entry = listed[name]
        if entry["dtype"] != NAMES[tensor.dtype]:
            wrong.append(f"{name}: dtype {entry['dtype']} instead of {NAMES[tensor.dtype]}")
        if entry["shape"] != list(tensor.shape):
            wrong.append(f"{name}: shape {entry['shape']} instead of {list(tensor.shape)}")
            continue
        strides = entry.get("strides") or row_major(entry["shape"])
        if tensor.numel() > 0:
            for size, ours, theirs in zip(tensor.shape, strides, tensor.stride()):
                if size > 1 and ours != theirs:
                    wrong.append(f"{name}: strides {strides} instead of {list(tensor.stride())}")
                    break
        lazy = tensor.is_conj() or tensor.is_neg()
        if entry.get("mappable", True) == lazy:
            wrong.append(f"{name}: mappable {entry.get('mappable')}, lazy {lazy}")
        if not lazy and elements_at(data, entry, tensor.element_size()) != raw_elements(tensor):
            wrong.append(f"{name}: other bytes")
    return wrong


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.embed = torch.nn.Embedding(6, 5)
        self.head = torch.nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, image):
        return self.norm(self.conv(image))


def trained(optimizer_class, **options):
    net = Net()
    optimizer = optimizer_class(net.parameters(), lr=0.1, **options)
    net(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return net, optimizer


def good_checkpoints():
    """(name, value, how to save it)"""
    base = numbers(4, 6)
    long = numbers(100)
    yield "contiguous", {"w": base.clone(), "b": numbers(6)}, {}
    for dtype, name in NAMES.items():
        yield f"dtype {name}", {"x": numbers(3, 5, dtype=dtype), "none": numbers(0, dtype=dtype)}, {}
        yield f"view of {name}", {"x": numbers(4, 6, dtype=dtype).t()[1:5, ::2]}, {}
    yield "transposed", {"t": base.t()}, {}
    yield "permuted", {"p": numbers(2, 3, 4, 5).permute(3, 0, 2, 1)}, {}
    yield "expanded", {"e": numbers(1, 4).expand(3, 4), "s": torch.tensor(7.0).expand(2, 2)}, {}
    yield "channels last", {"c": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)}, {}
    yield "channels last 3d", {"c": numbers(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d)}, {}
    yield "strided", {"even": long[::2], "odd": long[1::2], "far": long[90:], "mid": base[1:3, 2:5]}, {}
    yield "views of one storage", {"all": long, "a": long[:10], "b": long[10:30].reshape(4, 5),
                                   "d": base.diagonal(), "r": base[2], "c": base[:, 3]}, {}
    yield "unfolded", {"u": long.unfold(0, 10, 3)}, {}
    yield "as_strided", {"o": torch.as_strided(long, (5, 4), (2, 3), 7)}, {}
    yield "tied", {"a": base, "b": base}, {}
    yield "0-d", {"scalar": torch.tensor(3.5), "flag": torch.tensor(True), "i": torch.tensor(-2)}, {}
    yield "empty", {"e": torch.empty(0), "e2": torch.empty(3, 0, 5), "s": long[5:5]}, {}
    yield "bare", numbers(3, 3), {}
    yield "bare parameter", torch.nn.Parameter(numbers(3, 3)), {}
    yield "list", [numbers(2), numbers(3), [numbers(1)]], {}
    yield "tuple", (numbers(2), {"x": numbers(3)}, None, 5), {}
    yield "requires_grad", {"g": numbers(3).requires_grad_(), "n": numbers(3)}, {}
    yield "parameter", {"p": torch.nn.Parameter(numbers(3, 2)),
                        "f": torch.nn.Parameter(numbers(2), requires_grad=False)}, {}
    yield "nested", {"model": {"encoder": {"layers": {0: {"w": base}, 1: {"w": base + 1}}}},
                     "meta": {"epoch": 3, "lr": 1e-3, "name": "x", "none": None, "flags": [True, False],
                              "big": 2**40, "huge": 2**100, "neg": -5, "bytes": b"abc",
                              "complex": 1 + 2j, "set": {1, 2}, "array": bytearray(b"q")}}, {}
    yield "values of torch", {"w": numbers(2), "dtype": torch.float16, "size": torch.Size([2, 3]),
                              "device": torch.device("cpu"), "layout": torch.strided}, {}
    yield "odd names", {"": numbers(1), "a b\n\"c": numbers(1), "ключ/層": numbers(1),
                        "\u00e9\U0001f600": numbers(1), "x" * 5000: numbers(1), -7: numbers(1),
                        "tab\t": numbers(1), "quote'": numbers(1), "back\\slash": numbers(1)}, {}
    yield "conjugated", {"c": numbers(3, dtype=torch.complex64).conj(), "p": numbers(2)}, {}
    yield "negated", {"n": numbers(3, dtype=torch.complex64).conj().imag, "p": numbers(2)}, {}
    yield "real part", {"r": torch.view_as_real(numbers(3, dtype=torch.complex64))}, {}
    yield "many", {f"layer.{i}.weight": numbers(i % 7 + 1) for i in range(1500)}, {}
    yield "large", {"w": numbers(700, 300), "after": numbers(3)}, {}
    yield "state_dict", Net().state_dict(), {}
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        net, state = trained(optimizer, **options)
        yield f"training state of {optimizer.__name__}", {
            "epoch": 7, "model": net.state_dict(), "optimizer": state.state_dict(),
            "rng": torch.get_rng_state()}, {}
    yield "sub-module states", {"ema": Net().eval().state_dict(), "raw": Net().half().state_dict()}, {}
    shared = {"w": numbers(3)}
    yield "one dict twice", {"a": shared, "b": shared}, {}
    for protocol in (3, 4, 5):
        yield f"protocol {protocol}", {"w": base.t(), "n": {"x": long[3:7]}, "s": {1, 2}}, {
            "pickle_protocol": protocol}
    if hasattr(torch, "uint16"):
        pair = numbers(8, dtype=torch.float32)
        yield "one storage, two types", {"f": pair, "u": pair.view(torch.uint16)}, {}


def bad_checkpoints():
    """(name, what writes it, a word of the refusal)"""
    yield "whole module", lambda path: torch.save(Net(), path), "Net"
    yield "whole built-in module", lambda path: torch.save(torch.nn.Linear(2, 2), path), "torch.nn.modules"
    yield "whole optimizer", lambda path: torch.save(trained(torch.optim.SGD)[1], path), "torch.optim"
    yield "a function", lambda path: torch.save({"f": os.getpid}, path), "getpid"
    yield "a class beside tensors", lambda path: torch.save({"w": numbers(2), "r": range(3)}, path), "range"
    yield "TorchScript", lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path), "TorchScript"
    yield "legacy", lambda path: torch.save({"w": numbers(4)}, path,
                                            _use_new_zipfile_serialization=False), "legacy"
    yield "legacy module", lambda path: torch.save(Net(), path,
                                                   _use_new_zipfile_serialization=False), "legacy"
    yield "quantized", lambda path: torch.save(
        {"q": torch.quantize_per_tensor(numbers(4), 0.1, 0, torch.qint8)}, path), "_rebuild_qtensor"
    yield "sparse", lambda path: torch.save({"s": numbers(3, 3).to_sparse()}, path), "_rebuild_sparse_tensor"
    yield "meta", lambda path: torch.save({"m": torch.empty(3, device="meta")}, path), "_rebuild_meta"
    yield "one path twice", lambda path: torch.save({"a": {"b": numbers(1)}, "a.b": numbers(1)}, path), "a.b"
    yield "digits twice", lambda path: torch.save({1: numbers(1), "1": numbers(1)}, path), "'1'"
    yield "NUL in a name", lambda path: torch.save({"a\0b": numbers(1)}, path), "NUL"
    yield "surrogate in a name", lambda path: torch.save({"a\udc80": numbers(1)}, path), "UTF-8"
    yield "tuple as key", lambda path: torch.save({(1, 2): numbers(1)}, path), "neither text nor integer"

    def loop(path):
        value = {"w": numbers(1)}
        value["self"] = value
        torch.save(value, path)
    yield "a dict in itself", loop, "contains itself"


def cut(path, size):
    with open(path, "rb") as file:
        return file.read()[:size]


def main():
    if len(sys.argv) != 2 or not os.access(sys.argv[1], os.X_OK):
        print(__doc__.split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    modelctl = sys.argv[1]
    warnings.simplefilter("ignore")
    passed = failed = 0

    def report(name, wrong):
        nonlocal passed, failed
        if wrong:
            failed += 1
            print(f"FAILED {name}: " + "; ".join(wrong[:3]))
        else:
            passed += 1

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        for name, value, options in good_checkpoints():
            torch.save(value, path, **options)
            # What torch reads back, not what was in memory: saving may change strides.
            report(name, check_index(modelctl, path, torch.load(path)))
        for name, write, word in bad_checkpoints():
            try:
                write(path)
            except (NotImplementedError, RuntimeError) as error:
                print(f"not written by this PyTorch: {name}: {str(error).splitlines()[0]}")
                continue
            run = inspect(modelctl, path)
            lines = run.stderr.splitlines()
            good = run.returncode == 6 and not run.stdout and len(lines) == 1 and word in lines[0]
            report(name, [] if good else [f"exit {run.returncode}, {run.stderr.strip()[:300]!r}"])
        # A checkpoint that stops anywhere, as a download does.
        torch.save({"w": numbers(4, 4), "b": numbers(4)}, path)
        size = os.path.getsize(path)
        wrong = []
        for at in sorted({0, 1, 4, 30, 64, size // 3, size // 2, size - 98, size - 76, size - 22, size - 1}):
            short = os.path.join(folder, "cut.pt")
            with open(short, "wb") as file:
                file.write(cut(path, at))
            if inspect(modelctl, short).returncode != 6:
                wrong.append(f"accepted when cut at {at} of {size}")
        report("cut", wrong)
    print(f"PyTorch {torch.__version__}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
