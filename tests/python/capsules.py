"""DLPack capsules as a consumer in C reads them. Imports ctypes alone: tests give it to other processes."""
import ctypes as c

READ_ONLY, IS_COPIED = 1, 2


class DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32),
                ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16),
                ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)),
                ("byte_offset", c.c_uint64)]


class Legacy(c.Structure):
    _fields_ = [("tensor", DLTensor), ("context", c.c_void_p),
                ("deleter", c.CFUNCTYPE(None, c.c_void_p))]


class Versioned(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p),
                ("deleter", c.CFUNCTYPE(None, c.c_void_p)), ("flags", c.c_uint64),
                ("tensor", DLTensor)]


_API = c.pythonapi
_API.PyCapsule_GetName.restype = c.c_char_p
_API.PyCapsule_GetName.argtypes = [c.py_object]
_API.PyCapsule_GetPointer.restype = c.c_void_p
_API.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]
_API.PyCapsule_SetName.argtypes = [c.py_object, c.c_char_p]


def opened(capsule):
    """The name of a capsule and what is in it, which keeps the capsule."""
    name = _API.PyCapsule_GetName(capsule)
    kind = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}[name]
    managed = kind.from_address(_API.PyCapsule_GetPointer(capsule, name))
    managed.capsule = capsule
    return name, managed


def taken_from(capsule):
    """As a consumer takes it over: its deleter has to be called."""
    name, managed = opened(capsule)
    if _API.PyCapsule_SetName(capsule, b"used_" + name) != 0:
        raise AssertionError("the capsule does not take another name")
    del managed.capsule
    return managed
