"""Messages that the SDK of Tinker sends and takes as protobuf: the request of a pass, and the results with arrays.

A field is (number, kind); kinds that begin with a capital are messages of the table. The numbers are facts of the wire
format of tinker 0.38 (package `tinker_public`); a field that is not listed is skipped when it comes. Arrays are bytes:
int32 tokens, float32 or int64 values, little endian.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from asyncrl.gateway.http import Refused
from asyncrl.tinker.orders import PassOrder, PassReply, Row, SampleReply
from asyncrl.types import Logprobs, TokenIds

CONTENT_TYPE = "application/x-protobuf"
_PACKAGE = "tinker_public"
_FLOAT32, _INT64 = 1, 2
_STOP, _LENGTH = 0, 1

_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "EncodedTextChunk": {"tokens": (1, "bytes")},
        "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "bytes"), "dmel": (3, "bytes")},
        "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "bytes"), "dtype": (3, "int32"), "shape": (4, "int64*")},
        "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "map Tensor")},
        "ForwardBackwardRequest": {
            "model_id": (1, "string"),
            "seq_id": (2, "int32"),
            "data": (3, "Datum*"),
            "loss_fn": (4, "string"),
            "loss_fn_config": (5, "map double"),
            "forward_only": (6, "bool"),
            "loss_fn_config_v2": (7, "map LossConfigValue"),
        },
        "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
        "BatchedTensor": {
            "data": (1, "bytes"),
            "offsets": (2, "bytes"),
            "dtype": (3, "int32"),
            "trailing_shape": (4, "int64*"),
        },
        "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
        "ForwardBackwardOutput": {
            "loss_fn_output_type": (1, "string"),
            "loss_fn_outputs": (2, "ArrayRecord*"),
            "metrics": (3, "map double"),
        },
        "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
        "SampleResponse": {"sequences": (1, "SampledSequence*"), "prompt_logprobs": (2, "bytes")},
    }
)


class Protobuf:
    """Reads and writes those messages. One is made for a service."""

    def __init__(self) -> None:
        assert sys.byteorder == "little"
        pool = descriptor_pool.DescriptorPool()
        pool.Add(_file_of(_MESSAGES))
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in _MESSAGES
        }

    def read_pass(self, body: bytes) -> tuple[PassOrder, int, str]:
        """Return the order of a request for a pass, its sequence number, and what is wrong with its data or "".

        Raises: Refused where not even the number can be read.
        """
        request: Any = self._classes["ForwardBackwardRequest"]()
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise Refused(400, f"the body is no ForwardBackwardRequest: {error}") from None
        rows, fault = [], ""
        try:
            rows = [_row_of(index, datum) for index, datum in enumerate(request.data)]
            options = {key: float(value) for key, value in request.loss_fn_config.items()}
            for key, value in request.loss_fn_config_v2.items():
                if value.text:
                    raise ValueError(f"loss_fn_config: {key} must be a number, got {value.text[:80]!r}")
                options[key] = value.number
        except ValueError as error:
            rows, options, fault = [], {}, str(error)
        order = PassOrder(
            model=request.model_id,
            rows=rows,
            loss=request.loss_fn,
            options=options,
            backward=not request.forward_only,
        )
        return order, request.seq_id, fault

    def pass_reply(self, reply: PassReply) -> bytes:
        """Return a ForwardBackwardOutput."""
        output: Any = self._classes["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(reply.logprobs))
        field = record.fields["logprobs"]
        field.data = b"".join(row.tobytes() for row in reply.logprobs)
        field.offsets = np.cumsum([0, *(4 * len(row) for row in reply.logprobs)], dtype=np.int64).tobytes()
        field.dtype = _FLOAT32
        for key, value in reply.metrics.items():
            output.metrics[key] = value
        return _bytes_of(output)

    def sample_reply(self, reply: SampleReply) -> bytes:
        """Return a SampleResponse."""
        response: Any = self._classes["SampleResponse"]()
        for sequence in reply.sequences:
            response.sequences.add(
                stop_reason=_STOP if sequence.stopped else _LENGTH,
                tokens=sequence.token_ids.tobytes(),
                logprobs=sequence.logprobs.tobytes(),
            )
        if reply.prompt_logprobs is not None:
            response.prompt_logprobs = reply.prompt_logprobs.tobytes()
        return _bytes_of(response)


def _bytes_of(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _row_of(index: int, datum: Any) -> Row:
    """Return the row of a Datum. Raises: ValueError naming it."""
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.image or chunk.dmel:
            raise ValueError(f"data[{index}]: model_input must be text, got an image or sound")
        tokens += _array(chunk.encoded_text.tokens, np.dtype(np.int32), f"data[{index}]: model_input").tolist()
    inputs = {key: _tensor(tensor, f"data[{index}]: {key}") for key, tensor in datum.loss_fn_inputs.items()}
    return row_of(index, tokens, inputs)


def row_of(index: int, tokens: Sequence[int], inputs: Mapping[str, Sequence[float]]) -> Row:
    """Return the row of a datum's tokens and what a loss reads of it. Raises: ValueError naming what is missing."""
    if "target_tokens" not in inputs:
        raise ValueError(f"data[{index}]: target_tokens is missing in loss_fn_inputs")
    values = {key: Logprobs(map(float, found)) for key, found in inputs.items() if key != "target_tokens"}
    for key, found in values.items():
        if not all(map(math.isfinite, found)):
            raise ValueError(f"data[{index}]: {key} must be finite")
    try:
        return Row(
            token_ids=TokenIds(tokens),
            target_ids=TokenIds([int(token) for token in inputs["target_tokens"]]),
            values=values,
        )
    except OverflowError as error:
        raise ValueError(f"data[{index}]: no token ids: {error}") from None


def _tensor(tensor: Any, where: str) -> list[float]:
    if tensor.sparse_csr or len(tensor.shape) > 1:
        raise ValueError(f"{where} must be a dense vector; several targets a token are not computed here")
    if tensor.dtype not in (_FLOAT32, _INT64):
        raise ValueError(f"{where} must be float32 or int64, got type {tensor.dtype}")
    found: list[float] = _array(
        tensor.dense, np.dtype(np.float32 if tensor.dtype == _FLOAT32 else np.int64), where
    ).tolist()
    return found


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where} has {len(data)} bytes, which are no {dtype.name}")
    return np.frombuffer(data, dtype)


def _file_of(messages: Mapping[str, Mapping[str, tuple[int, str]]]) -> descriptor_pb2.FileDescriptorProto:
    """Return protobuf's description of a table of messages."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            repeated = kind.endswith("*") or kind.startswith("map ")
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind.startswith("map "):
                entry = message.nested_type.add(name="".join(map(str.capitalize, field_name.split("_"))) + "Entry")
                entry.options.map_entry = True
                _set_type(entry.field.add(name="key", number=1, label=1), "string")
                _set_type(entry.field.add(name="value", number=2, label=1), kind.removeprefix("map "))
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{name}.{entry.name}"
            else:
                _set_type(field, kind)
    return file


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind[0].isupper():
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
