"""Version 1 of the wire: `split_pb2` (messages) and `split_pb2_grpc` (service), generated from split.proto."""
