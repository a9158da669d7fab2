#!/usr/bin/env python3
"""torch.save, modelctl import, compare: names, dtypes, shapes and every byte, with what torch says.

usage: import_roundtrip.py MODELCTL

Needs python3-torch (python3-onnx for a part); ends with 77 without it.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

SYSTEM_PYTHON = "/usr/bin/python3"

try:
    import numpy
    import torch
except ImportError:
    # Debian's packages are for Debian's interpreter.
    if os.path.exists(SYSTEM_PYTHON) and os.path.realpath(sys.executable) != os.path.realpath(
            SYSTEM_PYTHON):
        os.execv(SYSTEM_PYTHON, [SYSTEM_PYTHON, "-B", *sys.argv])
    print("skipped: python3-torch is not installed")
    sys.exit(77)

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
         torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64"}
failures = []


def check(condition, text):
    if not condition:
        failures.append(text)
        print("FAILED:", text)


def raw(tensor):
    """The bytes of a tensor in row-major order, by torch and numpy alone."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().tobytes()


def canonical(data):
    """BF16 with one NaN."""
    bits = numpy.frombuffer(data, "<u2").copy()
    bits[(bits & 0x7fff) > 0x7f80] = 0x7fc0
    return bits


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", {})
    start = 8 + size
    return {name: (info["dtype"], info["shape"],
                   data[start + info["data_offsets"][0]:start + info["data_offsets"][1]])
            for name, info in header.items()}, metadata, start


def run(modelctl, *arguments, code=0):
    ended = subprocess.run([modelctl, "import", "-q", *map(str, arguments)], capture_output=True,
                           text=True, check=False, timeout=120)
    check(ended.returncode == code, f"{arguments}: {ended.returncode}, {ended.stderr}")
    return ended


def compare(path, expected):
    got, metadata, start = read_safetensors(path)
    check(start % 8 == 0, f"{path.name}: data starts at {start}")
    check(metadata.get("format") == "pt", f"{path.name}: {metadata}")
    check(sorted(got) == sorted(expected), f"{path.name}: {sorted(got)}, not {sorted(expected)}")
    for name, tensor in expected.items():
        if name not in got:
            continue
        dtype, shape, data = got[name]
        check(dtype == NAMES[tensor.dtype], f"{path.name}: {name}: {dtype}")
        check(shape == list(tensor.shape), f"{path.name}: {name}: {shape}")
        if dtype == "BF16":
            # torch 1.13 makes NaNs of other bits, on some processors.
            same = numpy.array_equal(canonical(data), canonical(raw(tensor)))
        else:
            same = data == raw(tensor)
        check(same, f"{path.name}: {name}: other bytes")


def state_dict():
    torch.manual_seed(5)
    base = torch.randn(6, 8)
    tied = torch.randn(5, 4)
    return {
        "plain": torch.randn(3, 4),
        "t": base.t(),
        "slice": base[1:5, 2:8:3],
        "expand": torch.randn(1, 3).expand(4, 3),
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "emb": tied, "head": tied,
        "scalar": torch.tensor(1.25),
        "empty": torch.zeros(0, 7),
        "f64": torch.randn(9, dtype=torch.float64),
        "f16": torch.randn(9).half(),
        "bf16": torch.randn(4, 64).bfloat16(),
        "special": torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, 65520.0,
                                 65519.9, 3.4e38, 1e-8]),
        "i64": torch.arange(-3, 4), "u8": torch.arange(9, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "c64": torch.randn(3, dtype=torch.complex64),
        "param": torch.nn.Parameter(torch.randn(2, 2)),
    }


def torch_part(modelctl, folder):
    tensors = state_dict()
    torch.save(tensors, folder / "plain.pt")
    run(modelctl, folder / "plain.pt", "--out", folder / "keep.safetensors")
    compare(folder / "keep.safetensors", tensors)
    for flag, dtype in [("f16", torch.float16), ("bf16", torch.bfloat16), ("f32", torch.float32)]:
        out = folder / f"{flag}.safetensors"
        run(modelctl, folder / "plain.pt", "--out", out, "--dtype", flag)
        # torch's own conversion; but from F64 to BF16 it rounds twice, by way of F32.
        expected = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                    for name, tensor in tensors.items()}
        compare(out, expected)

    optimizer = torch.optim.Adam([torch.nn.Parameter(tensors["plain"].clone())])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 4)
    optimizer.step()
    torch.save({"epoch": 3, "model": {"module.a": tensors["plain"], "module.b": tensors["bf16"]},
                "optimizer": optimizer.state_dict(), "note": "text"}, folder / "train.pt")
    run(modelctl, folder / "train.pt", "--out", folder / "model.safetensors", "--only", "model.*",
        "--strip-prefix", "model.module.")
    compare(folder / "model.safetensors", {"a": tensors["plain"], "b": tensors["bf16"]})
    run(modelctl, folder / "train.pt", "--out", folder / "rest.safetensors", "--exclude", "model.*")
    rest, _, _ = read_safetensors(folder / "rest.safetensors")
    check(all(name.startswith("optimizer.") for name in rest) and len(rest) >= 2, f"{list(rest)}")


def q8_by_definition(rows):
    """Blocks of 32 of each row, as ggml defines Q8_0, in numpy's F32."""
    blocks = rows.astype(numpy.float32).reshape(-1, 32)
    scale = (numpy.abs(blocks).max(axis=1) / numpy.float32(127)).astype(numpy.float32)
    with numpy.errstate(divide="ignore"):
        inverse = numpy.where(scale == 0, numpy.float32(0), numpy.float32(1) / scale)
    scaled = blocks * inverse[:, None]
    quants = (numpy.sign(scaled) * numpy.floor(numpy.abs(scaled) + numpy.float32(0.5)))
    return b"".join(scale[i].astype("<f2").tobytes() + quants[i].astype(numpy.int8).tobytes()
                    for i in range(len(blocks)))


def q8_part(modelctl, folder):
    torch.manual_seed(6)
    weight = torch.randn(33, 96) * torch.logspace(-6, 3, 33)[:, None]
    weight[5] = 0
    torch.save({"w": weight, "wt": weight.t().contiguous().t(), "half": weight[:, :32].half(),
                "bias": torch.randn(33), "odd": torch.randn(4, 33)}, folder / "q.pt")
    out = folder / "q.gguf"
    run(modelctl, folder / "q.pt", "--out", out, "--quantize", "q8_0", "--meta",
        "general.architecture=test")
    index = json.loads(subprocess.run([modelctl, "inspect", str(out), "-o", "json"], check=True,
                                      capture_output=True, timeout=60).stdout)
    data = out.read_bytes()
    found = {tensor["name"]: tensor for tensor in index["tensors"]}
    half = weight[:, :32].half().float().numpy()
    for name, rows in [("w", weight.numpy()), ("wt", weight.numpy()), ("half", half)]:
        tensor = found[name]
        check(tensor["dtype"] == "Q8_0", f"{name}: {tensor}")
        stored = data[tensor["offset"]:tensor["offset"] + tensor["nbytes"]]
        check(stored == q8_by_definition(rows), f"{name}: not the blocks of the definition")
    check(found["bias"]["dtype"] == "F32" and found["odd"]["dtype"] == "F32", "kept as they are")
    check(index["metadata"]["general.architecture"] == "test", f"{index['metadata']}")


def onnx_part(modelctl, folder):
    try:
        import onnx
        from onnx import helper, numpy_helper
    except ImportError:
        print("without python3-onnx: its part is left out")
        return
    types = {"f": onnx.TensorProto.FLOAT, "d": onnx.TensorProto.DOUBLE,
             "i": onnx.TensorProto.INT32, "l": onnx.TensorProto.INT64,
             "h": onnx.TensorProto.FLOAT16, "b": onnx.TensorProto.BOOL,
             "s": onnx.TensorProto.INT8, "q": onnx.TensorProto.UINT64}
    tensors, expected = [], {}
    for name, kind in types.items():
        for form in ("typed", "raw"):
            values = [1, 0, 1, 100] if kind != onnx.TensorProto.BOOL else [1, 0, 1, 1]
            tensor = helper.make_tensor(f"{name}.{form}", kind, [2, 2], values)
            array = numpy_helper.to_array(tensor)
            if form == "raw":
                tensor = numpy_helper.from_array(array, f"{name}.{form}")
            tensors.append(tensor)
            expected[tensor.name] = array
    graph = helper.make_graph([], "g", [], [], tensors)
    onnx.save(helper.make_model(graph), str(folder / "m.onnx"))
    run(modelctl, folder / "m.onnx", "--out", folder / "onnx.safetensors")
    got, _, _ = read_safetensors(folder / "onnx.safetensors")
    check(sorted(got) == sorted(expected), f"{sorted(got)}")
    for name, array in expected.items():
        check(got[name][2] == array.tobytes(), f"m.onnx: {name}: other bytes")


def main(argv):
    if len(argv) != 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        torch_part(argv[1], folder)
        q8_part(argv[1], folder)
        onnx_part(argv[1], folder)
    print(f"{len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
