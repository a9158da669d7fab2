#!/usr/bin/env python3
"""Writes model files to try modelhost with: real formats and names, made-up weights.

usage: make_model.py safetensors DIR [--mib N] [--shards N] [--seed N] [--last-seed N]
       make_model.py gguf FILE       [--mib N] [--seed N]

safetensors: a transformer in BF16 as a sharded set with its index, config.json, tokenizer.json and
checksums.sha256. The weights follow from --seed and the shard, so with another --last-seed only the
last shard differs, as after a fine-tuning of the last layers. gguf: one file with Q8_0 and F32
tensors. Standard library only.
"""
import argparse
import hashlib
import json
import pathlib
import random
import struct

MIB = 1 << 20
BLOCK = MIB
HIDDEN, INNER, VOCABULARY = 1024, 2816, 16000


def bf16_block(seed):
    """1 MiB of small BF16 numbers: random signs and mantissas, exponents near 2^-4."""
    noise = int.from_bytes(random.Random(seed).randbytes(BLOCK), "little")
    keep = int.from_bytes(b"\x7f\x81" * (BLOCK // 2), "little")
    base = int.from_bytes(b"\x80\x3c" * (BLOCK // 2), "little")
    return ((noise & keep) | base).to_bytes(BLOCK, "little")


def q8_0_block(seed):
    """About 1 MiB of Q8_0 blocks: an F16 scale of 2^-10 and 32 signed bytes each."""
    noise = random.Random(seed).randbytes(BLOCK)
    count = BLOCK // 34
    return b"".join(b"\x00\x14" + noise[i * 32:i * 32 + 32] for i in range(count))


def write_repeated(out, block, nbytes):
    for _ in range(nbytes // len(block)):
        out.write(block)
    out.write(block[:nbytes % len(block)])


def transformer(mib):
    """[(name, shape)] of about `mib` MiB in BF16."""
    tensors = [("model.embed_tokens.weight", [VOCABULARY, HIDDEN])]
    size = VOCABULARY * HIDDEN * 2
    layer = 0
    while size < mib * MIB:
        start = f"model.layers.{layer}."
        rows = [(start + "input_layernorm.weight", [HIDDEN])]
        rows += [(f"{start}self_attn.{name}_proj.weight", [HIDDEN, HIDDEN]) for name in "qkvo"]
        rows += [(start + "post_attention_layernorm.weight", [HIDDEN]),
                 (start + "mlp.gate_proj.weight", [INNER, HIDDEN]),
                 (start + "mlp.up_proj.weight", [INNER, HIDDEN]),
                 (start + "mlp.down_proj.weight", [HIDDEN, INNER])]
        tensors += rows
        size += 2 * sum(count(shape) for _, shape in rows)
        layer += 1
    tensors.append(("model.norm.weight", [HIDDEN]))
    return tensors, layer


def count(shape):
    result = 1
    for dimension in shape:
        result *= dimension
    return result


def write_shard(path, tensors, seed):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        nbytes = 2 * count(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    block = bf16_block(seed)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors:
            write_repeated(out, block, 2 * count(shape))


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def make_safetensors(folder, mib, shards, seed, last_seed):
    folder.mkdir(parents=True, exist_ok=True)
    tensors, layers = transformer(mib)
    share = sum(2 * count(shape) for _, shape in tensors) / shards
    sets, filled = [[]], 0
    for row in tensors:
        if filled >= share * len(sets) and len(sets) < shards:
            sets.append([])
        sets[-1].append(row)
        filled += 2 * count(row[1])
    weight_map = {}
    for number, rows in enumerate(sets, 1):
        name = f"model-{number:05d}-of-{len(sets):05d}.safetensors"
        last = number == len(sets)
        write_shard(folder / name, rows, f"{last_seed if last else seed}/{number}")
        weight_map.update({tensor: name for tensor, _ in rows})
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": filled}, "weight_map": weight_map}, indent=1))
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
         "num_hidden_layers": layers, "torch_dtype": "bfloat16", "vocab_size": VOCABULARY}, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(
        {"version": "1.0", "model": {"type": "BPE",
                                     "vocab": {f"token{i}": i for i in range(VOCABULARY)}}}))
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())
             if path.name != "checksums.sha256"]
    (folder / "checksums.sha256").write_text("".join(lines))


def gguf_text(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def make_gguf(path, mib, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    f32, q8_0 = 0, 8
    tensors, size, layer = [], 0, 0
    while size < mib * MIB:
        rows = [(f"blk.{layer}.attn_norm.weight", f32, [HIDDEN])]
        rows += [(f"blk.{layer}.attn_{name}.weight", q8_0, [HIDDEN, HIDDEN])
                 for name in ("q", "k", "v", "output")]
        rows += [(f"blk.{layer}.ffn_up.weight", q8_0, [INNER, HIDDEN]),
                 (f"blk.{layer}.ffn_down.weight", q8_0, [HIDDEN, INNER])]
        tensors += rows
        size += sum(gguf_bytes(kind, shape) for _, kind, shape in rows)
        layer += 1
    keys = [("general.architecture", 8, gguf_text("llama")),
            ("general.name", 8, gguf_text("quickstart speech")),
            ("general.alignment", 4, struct.pack("<I", 32)),
            ("llama.block_count", 4, struct.pack("<I", layer)),
            ("llama.embedding_length", 4, struct.pack("<I", HIDDEN)),
            ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1000) +
             b"".join(gguf_text(f"token{i}") for i in range(1000)))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, kind, value in keys:
        head += gguf_text(key) + struct.pack("<I", kind) + value
    offset = 0
    for name, kind, shape in tensors:
        head += gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape),
                                              kind, offset)
        offset += gguf_bytes(kind, shape) + -gguf_bytes(kind, shape) % 32
    q8_0_data = q8_0_block(seed)
    with open(path, "wb") as out:
        out.write(head + b"\0" * (-len(head) % 32))
        for _, kind, shape in tensors:
            nbytes = gguf_bytes(kind, shape)
            if kind == f32:
                out.write(struct.pack("<f", 1.0) * count(shape))
            else:
                write_repeated(out, q8_0_data, nbytes)
            out.write(b"\0" * (-nbytes % 32))


def gguf_bytes(kind, shape):
    return count(shape) * 4 if kind == 0 else count(shape) // 32 * 34


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("safetensors")
    one.add_argument("folder", type=pathlib.Path)
    one.add_argument("--mib", type=int, default=256)
    one.add_argument("--shards", type=int, default=4)
    one.add_argument("--seed", default="1")
    one.add_argument("--last-seed")
    two = kinds.add_parser("gguf")
    two.add_argument("file", type=pathlib.Path)
    two.add_argument("--mib", type=int, default=64)
    two.add_argument("--seed", default="1")
    arguments = parser.parse_args()
    if arguments.kind == "safetensors":
        make_safetensors(arguments.folder, arguments.mib, arguments.shards, arguments.seed,
                         arguments.last_seed or arguments.seed)
    else:
        make_gguf(arguments.file, arguments.mib, arguments.seed)


if __name__ == "__main__":
    main()
