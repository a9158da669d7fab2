#!/usr/bin/env python3
"""Writes the seeds of tensorrt_fuzzer into tensorrt/ beside this file."""
import json

from make_seeds import put, u32, u64


def plan(magic=b'ptrt', safe=0x61, standard=213, payload=32, error=0):
    head = magic + u32(safe) + u32(standard) + u64(payload + error) + u32(0x0a1ffa0d)
    return head + bytes(range(payload))


def prefixed(text, rest):
    return u32(len(text)) + text + rest


def main():
    put('tensorrt', 'plan', plan())
    put('tensorrt', 'ftrt', plan(b'ftrt', 0x57, 205))
    put('tensorrt', 'cut', plan(error=8))
    put('tensorrt', 'added', plan() + bytes(8))
    put('tensorrt', 'header', plan()[:14])
    put('tensorrt', 'old', b'ptrt' + u32(0x2b) + u32(205) + u32(1) + u64(4) + b'abcd')
    put('tensorrt', 'newer', plan(safe=0x62, standard=239))
    meta = {'description': 'a', 'batch': 1, 'imgsz': [640, 640], 'names': {'0': 'person'}}
    put('tensorrt', 'prefix', prefixed(json.dumps(meta).encode(), plan()))
    put('tensorrt', 'prefix_bad', prefixed(b'{"a":NaN}', plan()))
    put('tensorrt', 'prefix_only', prefixed(b'{}', b''))
    put('tensorrt', 'unknown', b'\x10\x20\x30\x40' + bytes(range(128, 168)))
    put('tensorrt', 'container', u64(40) + bytes(range(128, 160)))
    put('tensorrt', 'zeros', bytes(64))
    put('tensorrt', 'text', b'<html>not found</html>' * 2)
    put('tensorrt', 'requires', json.dumps({'tensorrt': '10.3.0', 'compute_capability': '8.7, 8.9', 'platform': 'linux-aarch64', 'cuda_driver': '12.4'}).encode())
    put('tensorrt', 'requires_plus', b'{"tensorrt":"8.6+","compute_capability":"8.0+","note":"\\u00e9"}')
    put('tensorrt', 'requires_bad', b'{"tensorrt":"10","tensorrt":1}')


if __name__ == '__main__':
    main()
