"""A model file opened as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from llamatrio.errors import GGUFError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.chat import ChatTemplate, load_template
from llamatrio.model.gguf import GGUFFile, open_gguf
from llamatrio.model.spec import ModelSpec
from llamatrio.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What the file says: numbers, tokens, template, and the tensors behind them. A context manager."""

    file: GGUFFile
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.file.path

    @property
    def name(self) -> str:
        """The file's name without its ending, as llama-server's clients know a model."""
        return self.file.path.stem

    @property
    def n_params(self) -> int:
        """Weights in the file."""
        return sum(math.prod(tensor.shape) for tensor in self.file.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.file.tensors.values())

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_model(path: str | Path, chat_template: str | None = None) -> Model:
    """Opens the GGUF file at `path` and reads all of it but the weights.

    chat_template: Jinja text, or `chatml`, to use instead of the file's own.

    Raises:
        ModelError: the file cannot be opened or served; one line that names what is wrong.
        ValueError: the template given does not compile.
    """
    file = open_gguf(path)
    try:
        spec = spec_from_gguf(file)
        tokenizer = load_tokenizer(file.metadata)
        if tokenizer.n_vocab != spec.n_vocab:
            raise GGUFError(f"the file has {tokenizer.n_vocab} tokens, but embeddings for {spec.n_vocab}")
        return Model(file, spec, tokenizer, load_template(file.metadata, tokenizer, chat_template))
    except BaseException:
        file.close()
        raise
