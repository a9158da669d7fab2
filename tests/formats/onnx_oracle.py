#!/usr/bin/env python3
"""Compares `modelctl inspect` with what the onnx package finds in models that it wrote itself.

    onnx_oracle.py MODELCTL

Needs Debian's python3-onnx (for /usr/bin/python3). Exit code 0: all equal; 1: differences, one line each;
77: the package is not there, as the last line says. The models are made in a temporary folder.
"""
import collections
import json
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import onnx
    from onnx import TensorProto, external_data_helper, helper, numpy_helper
except ImportError as missing:
    print('skipped: %s (apt-get install python3-onnx)' % missing)
    sys.exit(77)

# Names of this project for the types of the package; the bytes per element where numpy does not say.
DTYPES = {
    'FLOAT': 'F32', 'UINT8': 'U8', 'INT8': 'I8', 'UINT16': 'U16', 'INT16': 'I16', 'INT32': 'I32', 'INT64': 'I64',
    'STRING': 'STRING', 'BOOL': 'BOOL', 'FLOAT16': 'F16', 'DOUBLE': 'F64', 'UINT32': 'U32', 'UINT64': 'U64',
    'COMPLEX64': 'C64', 'COMPLEX128': 'C128', 'BFLOAT16': 'BF16', 'FLOAT8E4M3FN': 'F8_E4M3',
    'FLOAT8E4M3FNUZ': 'F8_E4M3FNUZ', 'FLOAT8E5M2': 'F8_E5M2', 'FLOAT8E5M2FNUZ': 'F8_E5M2FNUZ', 'UINT4': 'U4', 'INT4': 'I4',
    'FLOAT4E2M1': 'F4', 'FLOAT8E8M0': 'F8_E8M0', 'UINT2': 'U2', 'INT2': 'I2',
}
NUMPY = {'FLOAT': 'f4', 'UINT8': 'u1', 'INT8': 'i1', 'UINT16': 'u2', 'INT16': 'i2', 'INT32': 'i4', 'INT64': 'i8', 'BOOL': '?',
         'FLOAT16': 'f2', 'DOUBLE': 'f8', 'UINT32': 'u4', 'UINT64': 'u8', 'COMPLEX64': 'c8', 'COMPLEX128': 'c16'}
BITS = {'F8_E4M3': 8, 'F8_E4M3FNUZ': 8, 'F8_E5M2': 8, 'F8_E5M2FNUZ': 8, 'F8_E8M0': 8, 'BF16': 16, 'U4': 4, 'I4': 4, 'F4': 4,
        'U2': 2, 'I2': 2}
KNOWN = [name for name in TensorProto.DataType.keys() if name in DTYPES]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (4, 0, 2), (2, 1, 2, 3)]
random = np.random.default_rng(20260101)


def values(kind, shape):
    """An array of a type that numpy has."""
    dtype = np.dtype(NUMPY[kind])
    if dtype.kind in 'iu':
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, size=shape, dtype=dtype, endpoint=True)
    if dtype.kind == 'b':
        return random.integers(0, 2, size=shape).astype(bool)
    array = random.standard_normal(shape)
    return np.asarray(array + 1j * array[::-1] if dtype.kind == 'c' and shape else array).astype(dtype)


def packed_bytes(kind, shape):
    """Bytes for a type that numpy lacks."""
    bits = BITS[DTYPES[kind]] * int(np.prod(shape, dtype=np.int64))
    return random.integers(0, 256, size=(bits + 7) // 8, dtype=np.uint8).tobytes()


def raw(name, kind, shape):
    if kind in NUMPY:
        return numpy_helper.from_array(values(kind, shape), name)
    return helper.make_tensor(name, getattr(TensorProto, kind), shape, packed_bytes(kind, shape), raw=True)


def typed(name, kind, shape):
    number = getattr(TensorProto, kind)
    if kind in NUMPY:
        return helper.make_tensor(name, number, shape, values(kind, shape).flatten().tolist())
    if kind == 'BFLOAT16':
        return helper.make_tensor(name, number, shape, random.standard_normal(int(np.prod(shape))).tolist())
    tensor = TensorProto(name=name, data_type=number, dims=shape)
    if kind == 'STRING':
        tensor.string_data.extend(b'text %d' % i for i in range(int(np.prod(shape))))
    else:
        tensor.int32_data.extend(packed_bytes(kind, shape))
    return tensor


def external(tensor, location):
    if tensor.data_type != TensorProto.STRING:
        external_data_helper.set_external_data(tensor, location)
    return tensor


def output(name): return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def graph(name, initializers=(), nodes=(), sparse=()):
    return helper.make_graph(list(nodes), name, [], [output('out')], list(initializers), sparse_initializer=list(sparse))


def sparse(name):
    dense = np.zeros(9, np.float32)
    dense[[1, 4, 7]] = [1, 2, 3]
    return helper.make_sparse_tensor(numpy_helper.from_array(dense[[1, 4, 7]], name),
                                     numpy_helper.from_array(np.array([1, 4, 7], np.int64), name + '_at'), [9])


def constant(name, tensor): return helper.make_node('Constant', [], [name + '_out'], name=name, value=tensor)


def nested(depth):
    if depth == 0:
        return graph('leaf', [raw('w', 'FLOAT', (2,))], [constant('c', typed('', 'INT64', (3,)))])
    branch = helper.make_node('If', ['c'], ['out'], name='if%d' % depth, then_branch=nested(depth - 1), else_branch=graph('no'))
    return graph('g%d' % depth, [raw('w', 'FLOAT16', (3,))], [branch])


def all_types(make):
    return [make('%s_%d' % (kind, i), kind, shape) for kind in KNOWN for i, shape in enumerate(SHAPES)
            if make is typed or kind != 'STRING']


def models():
    """(name, model, keyword arguments of onnx.save)"""
    for make in (raw, typed):
        yield make.__name__, helper.make_model(graph('g', all_types(make))), {}
    one_by_one = [external(tensor, 'one/%d.bin' % i) for i, tensor in enumerate(all_types(raw))]
    yield 'external_files', helper.make_model(graph('g', one_by_one)), {}
    yield 'external_one', helper.make_model(graph('g', all_types(raw))), dict(
        save_as_external_data=True, all_tensors_to_one_file=True, location='weights.bin', size_threshold=0)
    mixed = [raw('big', 'FLOAT', (64, 64)), raw('small', 'FLOAT', (2,)), typed('typed', 'INT64', (5,))]
    nodes = [constant('c%d' % i, raw('', 'DOUBLE', (40, 40))) for i in range(3)]
    yield 'external_some', helper.make_model(graph('g', mixed, nodes)), dict(
        save_as_external_data=True, location='some.bin', size_threshold=1024, convert_attribute=True)
    yield 'subgraphs', helper.make_model(nested(8)), {}
    lists = helper.make_node('X', [], ['out'], tensors=[raw('a', 'INT8', (2,)), typed('b', 'FLOAT', (2,))],
                             graphs=[graph('x', [raw('w', 'FLOAT', (1,))]), nested(2)], sparse=sparse('s'))
    lists.attribute.append(helper.make_attribute('sparses', [sparse('s'), sparse('t')]))
    yield 'attributes', helper.make_model(graph('g', [], [lists], [sparse('sp'), sparse('sq')])), {}
    opset = [helper.make_opsetid('', 16)]
    functions = [helper.make_function('my.domain', name, [], ['out'], [constant('c', raw('', 'FLOAT', (3,))), helper.make_node(
        'If', ['c'], ['out'], then_branch=nested(1), else_branch=nested(0))], opset) for name in ('F', 'G')]
    yield 'functions', helper.make_model(graph('g', [raw('w', 'FLOAT', (2,))]), functions=functions), {}
    many = [raw('layers.%d.weight' % i, 'FLOAT16', (2, 2)) for i in range(5000)]
    yield 'many', helper.make_model(graph('g', many)), {}


def tensors_of(model):
    """All tensors with the name they must have; None where the index chooses one."""
    found = []

    def of_sparse(value):
        found.append((None, value.values))
        found.append((None, value.indices))

    def of_attribute(attribute):
        if attribute.HasField('t'):
            found.append((None, attribute.t))
        if attribute.HasField('sparse_tensor'):
            of_sparse(attribute.sparse_tensor)
        if attribute.HasField('g'):
            of_graph(attribute.g, False)
        found.extend((None, tensor) for tensor in attribute.tensors)
        for value in attribute.sparse_tensors:
            of_sparse(value)
        for value in attribute.graphs:
            of_graph(value, False)

    def of_nodes(nodes):
        for node in nodes:
            for attribute in node.attribute:
                of_attribute(attribute)

    def of_graph(value, main):
        found.extend((tensor.name if main else None, tensor) for tensor in value.initializer)
        for tensor in value.sparse_initializer:
            of_sparse(tensor)
        of_nodes(value.node)

    of_graph(model.graph, True)
    for function in model.functions:
        of_nodes(function.node)
    return found


def bytes_of(tensor, folder):
    """The values as raw_data would hold them; None for what lies there as text."""
    if tensor.data_type == TensorProto.STRING:
        return None
    if 0 in tensor.dims:  # Old versions of the package read the rest of the file for a length of 0.
        return b''
    if tensor.data_location == TensorProto.EXTERNAL:
        external_data_helper.load_external_data_for_tensor(tensor, folder)
    if tensor.HasField('raw_data'):
        return tensor.raw_data
    kind = TensorProto.DataType.Name(tensor.data_type)
    if kind.startswith('COMPLEX'):  # Old versions of the package fail here.
        return np.array(tensor.float_data, '<f4').tobytes() + np.array(tensor.double_data, '<f8').tobytes()
    if kind in NUMPY:
        return numpy_helper.to_array(tensor).astype(NUMPY[kind]).tobytes()
    return np.array(tensor.int32_data, dtype='<u2' if kind == 'BFLOAT16' else 'u1').tobytes()


def wanted(model, folder):
    result = []
    for name, tensor in tensors_of(model):
        data = bytes_of(tensor, folder)
        in_place = tensor.HasField('raw_data') or tensor.float_data or tensor.double_data or data == b''
        result.append((name, DTYPES[TensorProto.DataType.Name(tensor.data_type)], tuple(tensor.dims), bool(in_place),
                       data if in_place else None))
    return result


def listed(index, folder, names):
    result = []
    for tensor in index['tensors']:
        data = None
        if tensor['mappable']:
            with open(os.path.join(folder, tensor['file']), 'rb') as f:
                f.seek(tensor['offset'])
                data = f.read(tensor['nbytes'])
        result.append((tensor['name'] if tensor['name'] in names else None, tensor['dtype'], tuple(tensor['shape']),
                       tensor['mappable'], data))
    return result


def check(modelctl, name, model, options, folder):
    path = os.path.join(folder, 'model.onnx')
    os.makedirs(os.path.join(folder, 'one'))
    onnx.save(model, path, **options)
    run = subprocess.run([modelctl, 'inspect', path, '-o', 'json'], capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        return 0, ['%s: modelctl ended with %d: %s' % (name, run.returncode, run.stderr.strip())]
    index = json.loads(run.stdout)
    want = wanted(onnx.load(path, load_external_data=False), folder)
    have = listed(index, folder, {tensor[0] for tensor in want})
    names = [tensor['name'] for tensor in index['tensors']]
    faults = [] if len(names) == len(set(names)) else ['%s: a name stands twice' % name]
    in_package, in_index = collections.Counter(map(repr, want)), collections.Counter(map(repr, have))
    faults += ['%s: only in the package: %.200s' % (name, tensor) for tensor in in_package - in_index]
    faults += ['%s: only in the index: %.200s' % (name, tensor) for tensor in in_index - in_package]
    return len(want), faults


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    total, faults = 0, []
    for name, model, options in models():
        with tempfile.TemporaryDirectory() as folder:
            tensors, found = check(os.path.abspath(sys.argv[1]), name, model, options, folder)
        total += tensors
        faults += found
    for fault in faults:
        print(fault)
    print('onnx %s: %d tensors compared, %d differences' % (onnx.__version__, total, len(faults)))
    sys.exit(1 if faults else 0)


if __name__ == '__main__':
    main()
