#!/usr/bin/env python3
"""Writes the seeds of pickle_fuzzer and torch_zip_fuzzer into pickle/ and torch_zip/ beside this file."""
import io
import os
import struct
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))


def put(folder, name, data):
    path = os.path.join(HERE, folder)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, name), 'wb') as f:
        f.write(data)


def text(s):
    raw = s.encode()
    return b'X' + struct.pack('<I', len(raw)) + raw


def number(n): return b'K' + bytes([n]) if 0 <= n < 256 else b'J' + struct.pack('<i', n)
def name(module, attribute): return f'c{module}\n{attribute}\n'.encode()
def tuple_of(*parts): return b'(' + b''.join(parts) + b't'
def ints(*values): return tuple_of(*map(number, values))
def dict_of(*items): return b'}(' + b''.join(k + v for k, v in items) + b'u'
def list_of(*items): return b'](' + b''.join(items) + b'e'
def call(module, attribute, *args): return name(module, attribute) + tuple_of(*args) + b'R'
def ordered(): return name('collections', 'OrderedDict') + b')R'
def whole(value): return b'\x80\x02' + value + b'.'


def storage(kind, key, count, module='torch'):
    return tuple_of(text('storage'), name(module, kind), text(key), text('cpu'), number(count)) + b'Q'


def view(of, offset, size, stride, *metadata):
    return call('torch._utils', '_rebuild_tensor_v2', of, number(offset), ints(*size), ints(*stride), b'\x89',
                ordered(), *metadata)


def four(key='0'): return view(storage('FloatStorage', key, 4), 0, [4], [1])


def values():
    """Pickles by name; the storages 0, 1 and 2 have 16 bytes."""
    yield 'state_dict', (ordered() + b'q\x00(' + text('a.w') + b'q\x01' + four('0') + b'q\x02' + text('a.b') + four('1')
                         + b'u' + dict_of((text('_metadata'), ordered())) + b'b')
    yield 'views', dict_of((text('t'), view(storage('HalfStorage', '0', 8), 0, [4, 2], [1, 4])),
                           (text('e'), view(storage('HalfStorage', '0', 8), 3, [3, 2], [0, 1])),
                           (text('z'), view(storage('LongStorage', '1', 2), 2, [0, 5], [5, 1])))
    yield 'untyped', call('torch._utils', '_rebuild_tensor_v3', storage('UntypedStorage', '0', 16, 'torch.storage'),
                          number(1), ints(3), ints(2), b'\x89', ordered(), name('torch', 'uint16'))
    yield 'nested', dict_of(
        (text('model'), dict_of((text('w'), four() + b'r\x00\x01\x00\x00'), (number(7), b'j\x00\x01\x00\x00'))),
        (text('optimizer'), dict_of((text('state'), dict_of((number(0), dict_of((text('m'), four('1')), (text('step'), number(3)))))),
                                    (text('groups'), list_of(dict_of((text('lr'), b'G' + struct.pack('>d', 0.1)),
                                                                     (text('params'), list_of(number(0)))))))),
        (text('n'), b'N'), (text('t'), b'\x88'), (text('big'), b'\x8a\x09' + bytes(8) + b'\x01'), (text('s'), b'U\x01x'))
    yield 'parameter', call('torch._tensor', '_rebuild_from_type_v2', name('torch._utils', '_rebuild_parameter'),
                            name('torch.nn.parameter', 'Parameter'), tuple_of(four(), b'\x88', ordered()), b'}')
    yield 'lazy', view(storage('ComplexFloatStorage', '2', 2), 0, [2], [1], dict_of((text('conj'), b'\x88')))
    yield 'calls', list_of(call('__builtin__', 'set', list_of(number(1))), call('torch', 'Size', ints(2, 3)),
                           call('collections', 'Counter', dict_of((text('a'), number(1)))),
                           call('torch', 'device', text('cuda'), number(0)), name('torch', 'float32'),
                           call('_codecs', 'encode', text('a'), text('latin1')), name('collections', 'OrderedDict') + b')\x81')
    yield 'shared', b']q\x00' + four() + b'ah\x00\x86q\x01h\x01\x86'
    yield 'itself', b'}q\x00' + text('a') + b'h\x00s'
    yield 'forbidden', call('posix', 'getpid')


def parts(pickle, sizes=(16, 16, 16), options=0, changes=b''):
    return (b'\x01' + struct.pack('<H', len(pickle)) + pickle + bytes([len(sizes)]) + bytes(sizes) + bytes([options])
            + changes)


def plain_zip(members, method=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', method) as z:
        for member, data in members:
            z.writestr(zipfile.ZipInfo(member, (1980, 1, 1, 0, 0, 0)), data, method)
    return out.getvalue()


def main():
    for key, value in values():
        put('pickle', key, whole(value))
        put('torch_zip', key, parts(whole(value)))
    put('pickle', 'protocol4', b'\x80\x04\x95' + struct.pack('<Q', 34) + b'}\x94\x8c\x01a\x94\x8c\x0bcollections\x94'
        b'\x8c\x0bOrderedDict\x94\x93)R\x94s.')
    small = whole(dict_of((text('w'), four())))
    put('torch_zip', 'plain_end', parts(small, (16,), 3))
    put('torch_zip', 'reversed', parts(small, (16,), 4))
    put('torch_zip', 'changed', parts(small, (16,), 0, b'\x60\x00\x01'))
    members = [('m/data.pkl', small), ('m/data/0', b'd' * 16), ('m/version', b'3\n')]
    put('torch_zip', 'zipfile', b'\x00' + plain_zip(members))
    put('torch_zip', 'deflated', b'\x00' + plain_zip(members, zipfile.ZIP_DEFLATED))
    put('torch_zip', 'script', b'\x00' + plain_zip(members + [('m/constants.pkl', b'N.')]))
    put('torch_zip', 'npz', b'\x00' + plain_zip([('a.npy', b'x')]))


if __name__ == '__main__':
    main()
