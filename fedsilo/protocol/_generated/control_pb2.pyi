from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("sequence", "time", "policy_digest", "state_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: str
    policy_digest: str
    state_json: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[str] = ..., policy_digest: _Optional[str] = ..., state_json: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("since_sequence",)
    SINCE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    since_sequence: int
    def __init__(self, since_sequence: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "time", "name", "fields_json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: str
    name: str
    fields_json: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[str] = ..., name: _Optional[str] = ..., fields_json: _Optional[str] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("name", "arguments_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("error_code", "error_message", "data_json")
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    error_code: str
    error_message: str
    data_json: str
    def __init__(self, error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("name", "arguments_json", "request_id", "expires", "certificate_pem", "signature", "federation", "sealed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments_json: str
    request_id: str
    expires: str
    certificate_pem: bytes
    signature: bytes
    federation: str
    sealed: bytes
    def __init__(self, name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., request_id: _Optional[str] = ..., expires: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., federation: _Optional[str] = ..., sealed: _Optional[bytes] = ...) -> None: ...

class CommandReply(_message.Message):
    __slots__ = ("error_code", "error_message", "error_hint", "result_json")
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_HINT_FIELD_NUMBER: _ClassVar[int]
    RESULT_JSON_FIELD_NUMBER: _ClassVar[int]
    error_code: str
    error_message: str
    error_hint: str
    result_json: str
    def __init__(self, error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., error_hint: _Optional[str] = ..., result_json: _Optional[str] = ...) -> None: ...
