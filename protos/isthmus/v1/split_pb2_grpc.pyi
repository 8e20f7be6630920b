from collections.abc import Iterator

import grpc

from protos.isthmus.v1 import split_pb2

class SplitStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Session: grpc.StreamStreamMultiCallable[split_pb2.ClientFrame, split_pb2.ServerFrame]
    ListModels: grpc.UnaryUnaryMultiCallable[split_pb2.ListModelsRequest, split_pb2.ListModelsReply]
    Probe: grpc.StreamStreamMultiCallable[split_pb2.ProbeFrame, split_pb2.ProbeReply]
    Profile: grpc.UnaryStreamMultiCallable[split_pb2.ProfileRequest, split_pb2.ProfileReply]

class SplitServicer:
    def Session(self, request_iterator: Iterator[split_pb2.ClientFrame], context: grpc.ServicerContext) -> Iterator[split_pb2.ServerFrame]: ...
    def ListModels(self, request: split_pb2.ListModelsRequest, context: grpc.ServicerContext) -> split_pb2.ListModelsReply: ...
    def Probe(self, request_iterator: Iterator[split_pb2.ProbeFrame], context: grpc.ServicerContext) -> Iterator[split_pb2.ProbeReply]: ...
    def Profile(self, request: split_pb2.ProfileRequest, context: grpc.ServicerContext) -> Iterator[split_pb2.ProfileReply]: ...

def add_SplitServicer_to_server(servicer: SplitServicer, server: grpc.Server) -> None: ...
