"""A worker that speaks gRPC, as a process of its own: one JSON command on stdin, one answer on stdout.

Uses client/examples/grpc_worker.py, as a user's program would copy it, and sometimes misbehaves.
usage: grpc_peer.py RUNTIME_DIR, with the example and the generated modules on PYTHONPATH
"""
import json
import os
import queue
import sys
import threading

import grpc
import grpc_worker
import models
from google.protobuf import json_format
from modelhost.v1 import worker_pb2, worker_pb2_grpc


class Peer:
    def __init__(self, place):
        self.place = place
        self.sessions, self.models, self.channels = {}, {}, {}

    def stub(self, key="main"):
        if key not in self.channels:
            self.channels[key] = grpc.insecure_channel(
                f"unix:{self.place}/control.sock", [("grpc.use_local_subchannel_pool", 1)])
        return worker_pb2_grpc.WorkerStub(self.channels[key])

    def handles(self):
        return grpc_worker.Handles(f"{self.place}/handles.sock")

    def open(self, key="a"):
        self.sessions[key] = grpc_worker.Session(self.stub(key))
        return json_format.MessageToDict(self.sessions[key].opened)

    def acquire(self, ref="planner", key="a", timeout=10.0):
        grant = self.sessions[key].acquire(grpc_worker.parse_ref(ref), timeout)
        return {"lease": grant.lease, "version": grant.version, "generation": grant.generation,
                "ticket": grant.ticket.hex(), "digest": grant.digest, "label": grant.label}

    def redeclare(self, model, version, digest, label, key="a"):
        ref = worker_pb2.WorkerRef(model=model, version=version, digest=digest, label=label)
        request = worker_pb2.AcquireRequest(refs=[ref], redeclare=True)
        request.timeout.FromSeconds(20)
        grant = self.sessions[key]._ask(30, acquire=request).granted.grants[0]
        return {"lease": grant.lease, "ticket": grant.ticket.hex(), "version": grant.version}

    def map(self, name, ref="planner", key="a"):
        stub, handles = self.stub(key), self.handles()
        grant = self.sessions[key].acquire(grpc_worker.parse_ref(ref))
        self.models[name] = grpc_worker.Model(stub, handles, grant)
        handles.close()
        return {"lease": grant.lease, "version": grant.version,
                "tensors": len(self.models[name].tensors)}

    def seeds(self, name):
        """What the bytes of a mapped model say that they are of."""
        model = self.models[name]
        found = set()
        for tensor in model.tensors:
            found |= models.seeds_in(model.tensor(tensor))
        return sorted(found)

    def write(self, name):
        """Tries to write into a tensor, and through a descriptor opened anew."""
        view = self.models[name].tensor(sorted(self.models[name].tensors)[0])
        try:
            view[0] = 1
        except TypeError as error:
            return str(error)
        return "(written)"

    def fetch(self, ticket, lease, path, version):
        """A file of the version, read through a descriptor of its own."""
        handles = self.handles()
        index, regions = handles.redeem(bytes.fromhex(ticket))
        for fd in (index, *(region[0] for region in regions.values())):
            os.close(fd)
        ref = worker_pb2.WorkerRef(model="planner", version=version)
        for page in self.stub().GetIndex(worker_pb2.GetIndexRequest(ref=ref)):
            for file in page.files:
                if file.path == path:
                    fd, _, size = handles.fetch(lease, file.region)
                    with os.fdopen(fd, "rb") as opened:
                        return opened.read(size).decode()
        return None

    def redeem(self, ticket):
        handles = self.handles()
        try:
            index, regions = handles.redeem(bytes.fromhex(ticket))
        finally:
            handles.close()
        fds = [index, *(region[0] for region in regions.values())]
        sizes = [os.fstat(fd).st_size for fd in fds]
        for fd in fds:
            os.close(fd)
        return {"regions": len(regions), "sizes": sizes}

    def churn(self, times, key="a"):
        """Acquires and redeems, again and again, over one stream; every lease is kept."""
        handles = self.handles()
        for _ in range(times):
            grant = self.sessions[key].acquire(worker_pb2.WorkerRef(model="planner"))
            index, regions = handles.redeem(grant.ticket)
            for fd in (index, *(region[0] for region in regions.values())):
                os.close(fd)
        return {"fds": len(os.listdir("/proc/self/fd"))}

    def release(self, lease, key="a"):
        self.sessions[key].release(lease)

    def event(self, key="a", timeout=30.0):
        return json_format.MessageToDict(self.sessions[key].event(timeout))

    def close(self, key="a"):
        self.sessions.pop(key).close()

    def cut(self, key="a"):
        """The connection goes, with all that is on it."""
        self.sessions.pop(key)
        self.channels.pop(key).close()

    def deaf(self, requests, key="deaf"):
        """A stream with one lease, whose events nobody takes, with many requests on it."""
        waiting = queue.Queue()
        for number in range(requests):
            request = worker_pb2.SessionRequest()
            request.acquire.refs.add(model="none" if number else "planner")
            waiting.put(request)
        self.unsent_requests = waiting
        self.sessions[key] = self.stub(key).Session(iter(waiting.get, None))

    def unsent(self):
        """How many of them the stream has not taken yet."""
        return self.unsent_requests.qsize()

    def deaf_end(self, key="deaf"):
        """How that stream ended, once it is read after all."""
        ended = []

        def read():
            try:
                for _ in self.sessions[key]:
                    pass
                ended.append("OK")
            except grpc.RpcError as error:
                ended.append(error.code().name)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(60)
        return ended[0] if ended else "(goes on)"

    def resolve(self, ref):
        request = worker_pb2.ResolveRequest(ref=grpc_worker.parse_ref(ref))
        return json_format.MessageToDict(self.stub().Resolve(request, timeout=20))

    def index(self, ref, page_tensors=0):
        request = worker_pb2.GetIndexRequest(ref=grpc_worker.parse_ref(ref),
                                             page_tensors=page_tensors)
        pages = names = biggest = 0
        last = ""
        ordered = True
        for page in self.stub().GetIndex(request, timeout=120):
            pages += 1
            biggest = max(biggest, page.ByteSize())
            ordered = ordered and page.first_tensor == names
            for tensor in page.tensors:
                ordered = ordered and tensor.name > last
                last = tensor.name
                names += 1
        return {"pages": pages, "tensors": names, "biggest": biggest, "ordered": ordered}


def main():
    peer = Peer(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        verb = order.pop("do")
        try:
            answer = {"ok": True, "result": getattr(peer, verb)(**order)}
        except grpc_worker.Refused as refused:
            answer = {"ok": False, "code": refused.code, "message": str(refused)}
        except grpc.RpcError as error:
            answer = {"ok": False, "code": error.code().value[0], "message": error.details()}
        except (queue.Empty, ConnectionError, ValueError, PermissionError) as error:
            answer = {"ok": False, "code": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # Streams that nobody reads would hold the interpreter up.


if __name__ == "__main__":
    main()
