"""Everything that can go wrong, one tree; each class carries the exit code of the command line.

CkptError
├── CheckError          1  verify found damage, diff found a difference
├── UsageError          2  the request is malformed
├── SourceError         3  the source cannot be used as it is
│   ├── MissingError       something the source promises is not there
│   └── CorruptError       bytes or metadata contradict themselves
├── RequestError        4  source and request do not fit together
│   ├── LayoutError        a dim, head, layer or expert count does not divide
│   ├── MappingError       tensors unconsumed, unfilled, or of an unexpected shape
│   ├── DestinationError   the destination is not free
│   └── ResourceError      memory or disk space will not do
└── StorageError        5  a store refused or lost the operation

A message names the tensor and file, what was expected, what was found, and the next step.
"""


class CkptError(Exception):
    """Root of the errors that a user can act on."""

    exit_code = 1


class CheckError(CkptError):
    """A check that was asked for did not hold."""


class UsageError(CkptError):
    """The request itself is malformed: an option, a layout string, a mapping."""

    exit_code = 2


class SourceError(CkptError):
    """The source is missing, incomplete or corrupt."""

    exit_code = 3


class MissingError(SourceError, FileNotFoundError):
    """A file or tensor that the source promises is not there."""


class CorruptError(SourceError, ValueError):
    """Bytes or metadata contradict themselves or their checksum."""


class RequestError(CkptError, ValueError):
    """Source and request do not fit together."""

    exit_code = 4


class LayoutError(RequestError):
    """A dim, head, layer or expert count cannot be placed on the layout."""


class MappingError(RequestError):
    """Tensors are left over, missing, or of a shape the family does not expect."""


class DestinationError(RequestError):
    """The destination is not free to be written."""


class ResourceError(RequestError):
    """Memory or disk space will not do; both numbers are in the message."""


class StorageError(CkptError, OSError):
    """A store refused, lost or timed out an operation."""

    exit_code = 5
