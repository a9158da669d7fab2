#!/usr/bin/env python3
"""Writes the seeds of the fuzzers into safetensors/, gguf/ and sharded/ beside this file."""
import json
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))


def u16(n): return struct.pack('<H', n)
def u32(n): return struct.pack('<I', n & 0xffffffff)
def u64(n): return struct.pack('<Q', n & 0xffffffffffffffff)
def text(s): return u64(len(s)) + s.encode()


def put(folder, name, data):
    path = os.path.join(HERE, folder)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, name), 'wb') as f:
        f.write(data)


def safetensors(header, size):
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(',', ':')).encode()
    return u64(len(raw)) + raw + bytes(size)


def info(dtype, shape, begin, end):
    return {'dtype': dtype, 'shape': shape, 'data_offsets': [begin, end]}


def small(names):
    return safetensors({n: info('U8', [4], 4 * i, 4 * i + 4) for i, n in enumerate(names)}, 4 * len(names))


def gguf(keys, tensors, version=3, align=32):
    """keys: (name, type, bytes); tensors: (name, dims, type, size)"""
    out = b'GGUF' + u32(version) + u64(len(tensors)) + u64(len(keys))
    for name, kind, value in keys:
        out += text(name) + u32(kind) + value
    at = 0
    for name, dims, kind, size in tensors:
        out += text(name) + u32(len(dims)) + b''.join(map(u64, dims)) + u32(kind) + u64(at)
        at += size + -size % align
    return out + bytes(-len(out) % align) + bytes(at) if tensors else out


def split(no, count, tensors):
    return [('split.no', 2, u16(no)), ('split.count', 2, u16(count)), ('split.tensors.count', 5, u32(tensors))]


def bundle(files):
    return b''.join(bytes([len(n)]) + n.encode() + u16(len(d)) + d for n, d in files)


def main():
    put('safetensors', 'empty', safetensors({}, 0))
    put('safetensors', 'two', safetensors({'__metadata__': {'format': 'pt'}, 'w': info('BF16', [2, 3], 4, 16), 'b': info('F32', [], 0, 4)}, 16))
    put('safetensors', 'bits', safetensors({'a': info('F4', [3, 2], 0, 3), 'b': info('F6_E2M3', [4], 3, 6), 'e': info('I64', [0, 9], 6, 6)}, 6))
    put('safetensors', 'escapes', safetensors(b'{"\\u0061\\ud83d\\ude00":{"\\u0064type":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":[1.5e3,null,"z"]}}} \t\r\n', 1))
    put('safetensors', 'pointer', b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n')
    put('gguf', 'keys', gguf([('k%d' % i, i, v) for i, v in enumerate((b'\1', b'\1', u16(1), u16(1), u32(1), u32(1), u32(0x3f800000), b'\1', text('x'), u32(8) + u64(2) + text('a') + text('b'), u64(1), u64(1), u64(1)))], []))
    put('gguf', 'tensors', gguf([('general.alignment', 4, u32(64))], [('a', [3, 5], 0, 60), ('s', [], 1, 2), ('z', [0, 4], 0, 0), ('q', [256, 2], 12, 288)], align=64))
    put('gguf', 'v2', gguf([('general.architecture', 8, text('llama'))], [('w', [32], 2, 18)], version=2))
    put('gguf', 'array', gguf([('t', 9, u32(6) + u64(70) + bytes(280))], []))
    put('gguf', 'big_endian', b'GGUF' + struct.pack('>IQQ', 3, 0, 0))
    one, two = 'm-00001-of-00002', 'm-00002-of-00002'
    index = {'metadata': {'total_size': 8}, 'weight_map': {'a': one + '.safetensors', 'b': two + '.safetensors'}}
    put('sharded', 'set', bundle([('m.safetensors.index.json', json.dumps(index).encode()), (one + '.safetensors', small(['a'])), (two + '.safetensors', small(['b']))]))
    put('sharded', 'missing', bundle([('m.safetensors.index.json', json.dumps(index).encode()), (one + '.safetensors', small(['a', 'c']))]))
    put('sharded', 'outside', bundle([('i', b'{"weight_map":{"a":"../x"}}')]))
    put('sharded', 'gguf', bundle([(one + '.gguf', gguf(split(0, 2, 1), [])), (two + '.gguf', gguf(split(1, 2, 1), [('w', [4], 0, 16)]))]))
    put('sharded', 'gguf_second', bundle([(two + '.gguf', gguf(split(1, 2, 1), [('w', [4], 0, 16)])), (one + '.gguf', gguf(split(0, 2, 1), []))]))
    put('sharded', 'mixed', bundle([('a.safetensors', small(['a'])), ('b.onnx', b'\x08\x08\x3a\x00'), ('c.pt', b'PK\3\4'), ('d.gguf', gguf([], []))]))


if __name__ == '__main__':
    main()
