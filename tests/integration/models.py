"""Makes model files for tests: safetensors, sharded safetensors, GGUF. Standard library only.

The bytes tell where they belong: every 8-byte word of a tensor is `(seed << 32) | word number`, so
that a reader can tell which version a byte came from, and whether two of them were mixed.
"""
import array
import hashlib
import json
import os
import pathlib
import struct

WORD = 8


def fill(seed, nbytes):
    """`nbytes` (a multiple of 8) of words that name `seed`."""
    words = array.array("Q", range(nbytes // WORD))
    if seed:
        high = seed << 32
        words = array.array("Q", (high | word for word in words))
    return words.tobytes()


def big_fill(seed, nbytes, block=1 << 20):
    """As fill, but blocks of 1 MiB repeat: fast for large files. Yields pieces."""
    if nbytes >= block:
        piece = fill(seed, block)
        for _ in range(nbytes // block):
            yield piece
    if nbytes % block:
        yield fill(seed, nbytes % block)


def seeds_in(data):
    """The set of seeds that the words of `data` (bytes or a view) name."""
    words = memoryview(data).cast("B")
    words = words[:len(words) // WORD * WORD].cast("Q")
    return {word >> 32 for word in words}


def safetensors_header(tensors, metadata=None):
    """`tensors`: [(name, dtype, shape, nbytes)]. The 8-byte length and the padded JSON."""
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path, seed=1, tensors=4, tensor_bytes=64 << 10, prefix="layer", metadata=None):
    """A file of `tensors` I64 tensors, `prefix.0.weight` and so on. Returns its path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(f"{prefix}.{i}.weight", "I64", [tensor_bytes // WORD], tensor_bytes)
            for i in range(tensors)]
    with open(path, "wb") as out:
        out.write(safetensors_header(rows, metadata))
        for _ in rows:
            for piece in big_fill(seed, tensor_bytes):
                out.write(piece)
    return path


def write_paged(path, seed, pages=16):
    """One tensor of 4 KiB pages: word i is `(seed << 32) | i`, but the last word of each page is a
    checksum over the page that starts from the seed."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    words = array.array("Q", ((seed << 32) | i for i in range(pages * 512)))
    for page in range(pages):
        total = seed
        for word in words[page * 512:page * 512 + 511]:
            total = (total * 31 + word) & 0xFFFFFFFFFFFFFFFF
        words[page * 512 + 511] = total
    with open(path, "wb") as out:
        out.write(safetensors_header([("pages", "I64", [pages * 512], pages * 4096)]))
        out.write(words.tobytes())
    return path


def write_sharded(folder, seeds, tensors=2, tensor_bytes=64 << 10):
    """One shard per seed and the index. A shard depends on its seed and its place alone, so that
    two sets that give the same seed to the same place share that file's bytes."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for number, seed in enumerate(seeds, 1):
        name = f"model-{number:05d}-of-{len(seeds):05d}.safetensors"
        write_safetensors(folder / name, seed, tensors, tensor_bytes, prefix=f"shard.{number}")
        for i in range(tensors):
            weight_map[f"shard.{number}.{i}.weight"] = name
        total += tensors * tensor_bytes
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def _gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def write_gguf(path, seed=1, tensors=4, tensor_bytes=64 << 10, version=3):
    """F32 tensors `blk.0.weight` ... whose bytes are the words of fill()."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = [("general.architecture", 8, _gguf_string("llama")),
            ("general.alignment", 4, struct.pack("<I", 32)),
            ("general.name", 8, _gguf_string(f"test-{seed}"))]
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(keys))
    for key, kind, value in keys:
        head += _gguf_string(key) + struct.pack("<I", kind) + value
    for i in range(tensors):
        head += _gguf_string(f"blk.{i}.weight") + struct.pack("<IQIQ", 1, tensor_bytes // 4, 0,
                                                              i * tensor_bytes)
    head += b"\0" * (-len(head) % 32)
    with open(path, "wb") as out:
        out.write(head)
        for _ in range(tensors):
            for piece in big_fill(seed, tensor_bytes):
                out.write(piece)
    return path


def write_sidecars(folder, seed):
    folder = pathlib.Path(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "seed": seed}))
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "seed": seed}))


def simple_model(folder, seed, tensors=4, tensor_bytes=64 << 10):
    """A directory that can be published: one safetensors file and sidecars, all naming `seed`."""
    folder = pathlib.Path(folder)
    write_safetensors(folder / "model.safetensors", seed, tensors, tensor_bytes)
    write_sidecars(folder, seed)
    return folder


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_checksums(folder):
    folder = pathlib.Path(folder)
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())
             if path.is_file() and path.name != "checksums.sha256"]
    (folder / "checksums.sha256").write_text("".join(lines))


def folder_bytes(folder):
    return sum(os.path.getsize(path) for path in pathlib.Path(folder).rglob("*") if path.is_file())
