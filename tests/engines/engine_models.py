"""Models that real engines run: a llama in GGUF, and an embedding with a linear layer in ONNX. Standard
library only; the same arguments give the same bytes on every machine."""
import array
import math
import pathlib
import random
import struct

F32 = 4  # Bytes of one element.


def weights(seed, count, scale=0.25):
    """`count` floats as bytes. A block of a prime length repeats, so rows differ and big ones are
    made fast."""
    source = random.Random(seed)
    block = array.array("f", ((source.random() - 0.5) * 2 * scale for _ in range(min(count, 16381))))
    data = block.tobytes()
    return (data * (count * F32 // max(len(data), 1) + 1))[:count * F32]


def _text(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


# Types of GGUF metadata.
_U16, _U32, _I32, _FLOAT, _BOOL, _STRING, _ARRAY = 2, 4, 5, 6, 7, 8, 9
_PACK = {_U16: "<H", _U32: "<I", _I32: "<i", _FLOAT: "<f", _BOOL: "<?"}


def _value(kind, value):
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack(_PACK[kind], value)


def _vocabulary():
    """A SentencePiece vocabulary as small as it goes: three control tokens, all bytes, some letters."""
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    tokens += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    tokens += [(letter, 1) for letter in "▁abcdefghijklmnopqrstuvwxyz"]
    return tokens


def _llama(seed, width, hidden, blocks, heads):
    """Its metadata, and its tensors: (name, shape with the fastest dimension first, bytes)."""
    tokens = _vocabulary()
    keys = [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, f"tiny-{seed}"),
        ("general.alignment", _U32, 32),
        ("general.file_type", _U32, 0),
        ("llama.vocab_size", _U32, len(tokens)),
        ("llama.context_length", _U32, 256),
        ("llama.embedding_length", _U32, width),
        ("llama.block_count", _U32, blocks),
        ("llama.feed_forward_length", _U32, hidden),
        ("llama.attention.head_count", _U32, heads),
        ("llama.attention.head_count_kv", _U32, heads),
        ("llama.attention.layer_norm_rms_epsilon", _FLOAT, 1e-5),
        ("llama.rope.dimension_count", _U32, width // heads),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, [text for text, _ in tokens])),
        ("tokenizer.ggml.scores", _ARRAY, (_FLOAT, [-float(i) for i in range(len(tokens))])),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, [kind for _, kind in tokens])),
        ("tokenizer.ggml.bos_token_id", _U32, 1),
        ("tokenizer.ggml.eos_token_id", _U32, 2),
        ("tokenizer.ggml.unknown_token_id", _U32, 0),
        ("tokenizer.ggml.add_bos_token", _BOOL, True),
    ]
    shapes = [("token_embd.weight", [width, len(tokens)])]
    for block in range(blocks):
        for name, shape in (("attn_norm", [width]), ("attn_q", [width, width]), ("attn_k", [width, width]),
                            ("attn_v", [width, width]), ("attn_output", [width, width]),
                            ("ffn_norm", [width]), ("ffn_gate", [width, hidden]),
                            ("ffn_up", [width, hidden]), ("ffn_down", [hidden, width])):
            shapes.append((f"blk.{block}.{name}.weight", shape))
    shapes += [("output_norm.weight", [width]), ("output.weight", [width, len(tokens)])]
    tensors = []
    for number, (name, shape) in enumerate(shapes):
        norm = name.endswith("norm.weight")
        tensors.append((name, shape, struct.pack("<f", 1.0) * shape[0] if norm else
                        weights(seed * 1000 + number, math.prod(shape))))
    return keys, tensors


def _write_gguf(path, keys, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in keys)
    offset = 0
    for name, shape, body in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += len(body) + -len(body) % 32
    with open(path, "wb") as out:
        out.write(head + b"\0" * (-len(head) % 32))
        for _, _, body in tensors:
            out.write(body + b"\0" * (-len(body) % 32))
    return path


def write_llama(path, seed=1, width=64, hidden=128, blocks=2, heads=4):
    """A llama with random weights, as llama.cpp loads it. All of its floats are F32."""
    return _write_gguf(pathlib.Path(path), *_llama(seed, width, hidden, blocks, heads))


def write_split_llama(folder, seed=1, width=64, hidden=128, blocks=2, heads=4):
    """The same in two files; the path of the first. Loaders find the other one by its name."""
    keys, tensors = _llama(seed, width, hidden, blocks, heads)
    paths = [pathlib.Path(folder) / f"chat-{number:05d}-of-00002.gguf" for number in (1, 2)]
    middle = len(tensors) // 2
    for number, part in enumerate((tensors[:middle], tensors[middle:])):
        split = [("split.no", _U16, number), ("split.count", _U16, 2), ("split.tensors.count", _I32, len(tensors))]
        _write_gguf(paths[number], (keys if number == 0 else []) + split, part)
    return paths[0]


def _varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def _field(number, value):
    """A field of a protocol buffer message: an int, a text, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


_FLOAT_TYPE, _INT64_TYPE, _EXTERNAL = 1, 7, 1


def _tensor(name, shape, data):
    fields = b"".join(_field(1, size) for size in shape) + _field(2, _FLOAT_TYPE) + _field(8, name)
    return fields + _field(9, data)


def _external_tensor(name, shape, location, offset, length):
    fields = b"".join(_field(1, size) for size in shape) + _field(2, _FLOAT_TYPE) + _field(8, name)
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        fields += _field(13, _field(1, key) + _field(2, value))
    return fields + _field(14, _EXTERNAL)


def _node(kind, inputs, output):
    return (b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(3, output + "_node") +
            _field(4, kind))


def _value_info(name, element, shape):
    dims = b"".join(_field(1, _field(1, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, element) + _field(2, dims)))


IDS = 4


def write_onnx(folder, seed=1, rows=256, width=64, out=16, external=False, location="weights.bin"):
    """`y = table[ids] @ w + b`, with `ids` of 4 rows: model.onnx in `folder`. With `external` the table
    and w stand in `location` beside it, 4 KiB aligned."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"table": [rows, width], "w": [width, out], "b": [out]}
    bodies = {name: weights(seed * 1000 + number, math.prod(shape))
              for number, (name, shape) in enumerate(shapes.items())}
    initializers, blob = [], bytearray()
    for name, shape in shapes.items():
        if external and name != "b":
            blob += b"\0" * (-len(blob) % 4096)
            initializers.append(_external_tensor(name, shape, location, len(blob), len(bodies[name])))
            blob += bodies[name]
        else:
            initializers.append(_tensor(name, shape, bodies[name]))
    if external:
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).write_bytes(blob)
    graph = b"".join(_field(1, node) for node in (
        _node("Gather", ["table", "ids"], "rows"), _node("MatMul", ["rows", "w"], "product"),
        _node("Add", ["product", "b"], "y")))
    graph += _field(2, f"tiny-{seed}")
    graph += b"".join(_field(5, tensor) for tensor in initializers)
    graph += _field(11, _value_info("ids", _INT64_TYPE, [IDS])) + _field(12, _value_info("y", _FLOAT_TYPE, [IDS, out]))
    model = _field(1, 8) + _field(2, "modelhost-tests") + _field(7, graph) + _field(8, _field(1, "") + _field(2, 13))
    (folder / "model.onnx").write_bytes(model)
    return folder
