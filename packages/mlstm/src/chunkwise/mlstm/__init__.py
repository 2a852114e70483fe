"""mLSTM of xLSTM, linear attention with exponential gates and a normaliser: over sequences, and token by token."""

from chunkwise.mlstm.api import chunk_mlstm, recurrent_mlstm
from chunkwise.mlstm.operator import MlstmState
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["MlstmState", "chunk_mlstm", "recurrent_mlstm"]
