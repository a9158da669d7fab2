#!/usr/bin/env python3
"""Writes the seeds of the ONNX fuzzer into onnx/ beside this file: one for each thing that the reader tells apart."""
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
ALL = (1 << 64) - 1


def varint(n):
    out = b''
    while n > 0x7f:
        out += bytes([n & 0x7f | 0x80])
        n >>= 7
    return out + bytes([n])


def tag(field, wire): return varint(field << 3 | wire)
def num(field, n): return tag(field, 0) + varint(n & ALL)
def raw(field, data): return tag(field, 2) + varint(len(data)) + data
def text(field, s): return raw(field, s.encode())
def packed(field, numbers): return raw(field, b''.join(varint(n & ALL) for n in numbers))


def tensor(name, kind, dims, rest=b''):
    return b''.join(num(1, d) for d in dims) + num(2, kind) + (text(8, name) if name else b'') + rest


def floats(name, n): return tensor(name, 1, [n], raw(9, struct.pack('<%df' % n, *range(n))))
def entry(key, value): return text(1, key) + text(2, value)


def external(name, kind, dims, **keys):
    return tensor(name, kind, dims, b''.join(raw(13, entry(k, v)) for k, v in keys.items()) + num(14, 1))


def sparse(name, indices): return raw(1, floats(name, 2)) + raw(2, indices) + num(3, 9)
def attribute(name, field, *values): return text(1, name) + b''.join(raw(field, v) for v in values)


def node(name, output, *attributes):
    return text(2, output) + (text(3, name) if name else b'') + text(4, 'Op') + b''.join(raw(5, a) for a in attributes)


def graph(initializers=(), nodes=(), sparses=()):
    return b''.join([raw(1, n) for n in nodes] + [raw(5, t) for t in initializers] + [raw(15, s) for s in sparses])


def model(main, rest=b''): return num(1, 8) + text(2, 'p') + raw(7, main) + raw(8, text(1, '') + num(2, 17)) + rest


def put(name, data, side=bytes(64)):
    folder = os.path.join(HERE, 'onnx')
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), 'wb') as f:
        f.write(struct.pack('<H', len(data)) + data + side)


def main():
    i64 = tensor('', 7, [2], raw(9, bytes(16)))
    put('raw', model(graph([floats('w', 2), tensor('h', 10, [3], raw(9, bytes(6))), tensor('n', 22, [3], raw(9, b'\x21\x03')), tensor('e', 11, [0, 4], raw(9, b''))])))
    put('int32_data', model(graph([tensor('t%d' % k, k, [2], packed(5, [1, 0])) for k in (2, 3, 4, 5, 6, 9, 10, 16, 17, 24)] + [tensor('u4', 21, [3], packed(5, [0x21, 3])), tensor('i2', 26, [5], packed(5, [0xe4, 1]))])))
    put('int64_data', model(graph([tensor('i', 7, [2, 1], packed(7, [-1, 1 << 62])), tensor('u', 13, [2], packed(11, [ALL, 0])), tensor('v', 12, [1], num(11, 7)), tensor('s', 8, [2], text(6, 'a') + text(6, ''))])))
    one = struct.pack('<f', 1)
    put('float_data', model(graph([tensor('run', 1, [2], raw(4, one * 2)), tensor('two', 1, [2], raw(4, one) + raw(4, one)), tensor('single', 1, [1], tag(4, 5) + one), tensor('c', 14, [1], raw(4, one * 2)), tensor('d', 11, [1], raw(10, one * 2)), tensor('z', 15, [1], tag(10, 1) + one * 2 + raw(10, one * 2))])))
    put('external', model(graph([external('a', 1, [4], location='w.bin'), external('b', 1, [2], location='./w.bin', offset='16', length='8', checksum='0'), floats('c', 1)])))
    put('outside', model(graph([external('a', 1, [4], location='../w.bin', offset='-1')])))
    inner = graph([floats('w', 1)], [node('', 'y', attribute('value', 5, floats('', 1)))])
    put('subgraphs', model(graph([floats('w', 1)], [node('if', 'y', attribute('then_branch', 6, inner), attribute('else_branch', 6, graph())), node('', 'z', attribute('bodies', 11, inner, inner))])))
    put('attributes', model(graph([], [node('n', 'o', attribute('t', 5, floats('', 1)), attribute('l', 10, floats('', 1), i64), attribute('s', 22, sparse('', i64)), attribute('r', 23, sparse('x', i64), sparse('x', i64)))])))
    put('sparse', model(graph([floats('w', 1)], [], [sparse('sp', i64), raw(2, tensor('', 7, [2, 1], raw(9, bytes(16)))) + raw(1, floats('sq', 2))])))
    put('functions', model(graph(), raw(25, text(1, 'F') + text(10, 'd') + raw(7, node('c', 'o', attribute('value', 5, floats('', 1)))) + raw(11, attribute('alpha', 5, floats('', 1))))))
    put('metadata', model(graph(), text(3, '1') + text(4, 'd') + num(5, -1) + raw(14, entry('k', 'v')) + raw(14, entry('k', 'w')) + raw(20, b'')))
    put('merged', model(graph([floats('a', 1)]), raw(7, graph([packed(1, [2, 1]) + raw(9, b'x') + raw(9, bytes(8)) + num(2, 1) + text(8, 'b')]))))
    put('unknown', model(graph([floats('w', 1) + num(99, 1) + tag(98, 1) + bytes(8) + tag(97, 3) + num(1, 1) + tag(97, 4) + tag(96, 5) + bytes(4)])))


if __name__ == '__main__':
    main()
