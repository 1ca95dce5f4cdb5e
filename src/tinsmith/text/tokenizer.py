"""Tokenizers on the `tokenizers` library alone, under the method names that programs use on those of transformers.

They are loaded from a directory, from a server's files or from the Hugging Face hub. The libraries tokenizers,
huggingface_hub and transformers are imported when they are needed.
(Compared with transformers in tests/contract/test_tokenizers_contract.py.)
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.text.chat_template import check_objects, chosen_template, render
from tinsmith.text.optional_packages import library

MAX_FILE_BYTES = 128 * 2**20
"""The largest tokenizer file that is read; those of current models have up to 40 MB."""
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NEED_TRANSFORMERS = frozenset(
    {
        "continue_final_message",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of apply_chat_template that are not for the template, and that only transformers' own tokenizers take."""
LLAMA_3_MIRROR = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""A public copy of the tokenizer that the gated Llama 3 models share."""
PINNED_REVISIONS: Mapping[str, str] = {
    "moonshotai/Kimi-K2-Thinking": "612681931a8c906ddb349f8ad0f582cb552189cd",
    "moonshotai/Kimi-K2.5": "4d01dfe0332d63057c186e0b262165819efb6611",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
    "moonshotai/Kimi-K3": "f831ab66814297da540d832a5235f8e904f29d06",
}
"""Tokenizers that are code, at the revisions that the official client runs it from."""


def tokenizer_source(model_name: str, tokenizer_id: str | None = None) -> str:
    """Return the hub id of a model's tokenizer: the one the server gives, else one derived from the model's name."""
    if tokenizer_id is not None:
        return tokenizer_id
    if Path(model_name).is_dir():
        return model_name
    name = model_name.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_3_MIRROR
    parts = name.split("/")
    return "/".join(parts[:2]) if len(parts) == 3 else name


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """What a tokenizer is made of: the content of tokenizer.json, of tokenizer_config.json, and the chat template."""

    tokenizer_json: bytes = field(repr=False)
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    chat_template: str | None = field(default=None, repr=False)

    @functools.cached_property
    def digest(self) -> str:
        rest = json.dumps([self.config, self.chat_template], sort_keys=True).encode()
        return hashlib.sha256(hashlib.sha256(self.tokenizer_json).digest() + rest).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizerFiles) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files of a directory, laid out as on the hub; all but tokenizer.json may be missing."""
        paths = [directory / name for name in FILES]
        tokenizer_json, config, tokens, template = (_content_of(path) if path.exists() else None for path in paths)
        if tokenizer_json is None:
            raise InvalidInputError(
                f"{directory} contains no tokenizer.json; load a tokenizer in another format with "
                "load_tokenizer(..., prefer_transformers=True), which needs pip install transformers"
            )
        merged = json.loads(config or b"{}") | json.loads(tokens or b"{}")
        return cls(tokenizer_json, merged, template.decode() if template is not None else None)


def _content_of(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidInputError(f"{path} is larger than {MAX_FILE_BYTES} bytes, too large for a tokenizer")
    return content


def load_tokenizer(
    source: str | Path | TokenizerFiles,
    *,
    revision: str | None = None,
    prefer_transformers: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Load a tokenizer from a directory, from files that a server sent, or from the hub by its id.

    Returns a `Tokenizer` or, with `prefer_transformers`, what transformers' AutoTokenizer loads. Only the latter can
    run code from the hub, and only with `trust_remote_code`. `revision` is a revision on the hub.
    """
    if prefer_transformers:
        return _from_transformers(source, revision, trust_remote_code)
    if isinstance(source, TokenizerFiles):
        return Tokenizer(source)
    directory = Path(source) if source and Path(source).is_dir() else _from_hub(str(source), revision)
    return Tokenizer(TokenizerFiles.read(directory), str(source))


class Encoding(dict[str, Any]):
    """Token ids and attention mask, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"an Encoding has {', '.join(self)}, not {name}")
        return self[name]


def _id_of(name: str) -> Any:
    return property(lambda self: self._id(getattr(self, name)), doc=f"The id of the {name}, if there is one.")


class Tokenizer:
    """Converts text to token ids and back. Safe to share between threads; pickled by content.

    The named special tokens (`eos_token` and so on) can be set to other tokens of the vocabulary; None means there is
    none. Tokenizers of the same content share the vocabulary in memory, but not these.
    """

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id = _id_of("bos_token")
    eos_token_id = _id_of("eos_token")
    unk_token_id = _id_of("unk_token")
    pad_token_id = _id_of("pad_token")

    def __init__(self, files: TokenizerFiles, name_or_path: str = "") -> None:
        self.files = files
        self.name_or_path = name_or_path
        with _LOADING:
            self._backend = _backend(files)
        for name in NAMED_TOKENS:
            setattr(self, name, _content(files.config.get(name)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self.name_or_path), {name: getattr(self, name) for name in NAMED_TOKENS}

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens)"

    def __len__(self) -> int:
        """The number of all tokens, including added ones."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the model's own vocabulary, without added ones."""
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens that are set."""
        named = {name: getattr(self, name) for name in NAMED_TOKENS} | _extra_tokens(self.files.config)
        return {name: token for name, token in named.items() if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.special_tokens_map.values(), *_listed_tokens(self.files.config)]))

    @property
    def all_special_ids(self) -> list[int]:
        return [self._backend.token_to_id(token) for token in self.all_special_tokens]

    def special_texts(self) -> list[str]:
        """Return the texts of all special tokens, including those without a name."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]

    def special_ids(self) -> list[int]:
        """Return the ids of all special tokens, including those without a name."""
        return [self._backend.token_to_id(text) for text in self.special_texts()]

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that a text stands for; None if it is ordinary text."""
        return self._id(text) if text in self.special_texts() else None

    def has_token(self, text: str) -> bool:
        """Whether a text is one token of the vocabulary."""
        return self._id(text) is not None

    def template_for(self, *, has_tools: bool) -> str:
        """Return the chat template; the one for tools if there are tools and such a template."""
        return chosen_template(_templates(self.files), None, has_tools=has_tools)

    @property
    def chat_template(self) -> str | None:
        """The template used when there are no tools."""
        return _templates(self.files).get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; `add_special_tokens` includes those that the tokenizer puts around every text."""
        if not isinstance(text, str):
            raise InvalidInputError(f"text: expected a string, got {type(text).__name__}", field="text")
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return the ids and attention mask of a text, or lists of them for several texts."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(item, add_special_tokens) for item in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids: a list, an array, a tensor, or a single id."""
        text: str = self._backend.decode(_id_list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Return the token of an id, or a list of them."""
        tokens = [self._backend.id_to_token(token_id) for token_id in _id_list(ids)]
        return tokens[0] if isinstance(ids, int) else tokens

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or a list of them; for an unknown one the id of the unknown token, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._id(tokens)
        return self.unk_token_id if found is None else found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return a conversation as token ids, as text (`tokenize=False`), or as an `Encoding` (`return_dict=True`).
        Further arguments are variables of the template."""
        for name in sorted(NEED_TRANSFORMERS & kwargs.keys()):
            if kwargs.pop(name):
                raise InvalidInputError(
                    f"{name}: only load_tokenizer(..., prefer_transformers=True) has it", field=name
                )
        check_objects("messages", messages)
        check_objects("tools", tools or ())
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        template = chosen_template(_templates(self.files), chat_template, has_tools=bool(tools))
        text = render(template, {"documents": None} | self.special_tokens_map | conversation | kwargs)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def _id(self, token: str | None) -> int | None:
        found: int | None = self._backend.token_to_id(token) if token is not None else None
        return found


_LOADING = threading.Lock()
"""Held while a vocabulary is loaded, so that other threads wait for it instead of loading it again."""


@functools.lru_cache(maxsize=16)
def _backend(files: TokenizerFiles) -> Any:
    """Load the vocabulary and its rules; the cached object is never modified."""
    tokenizers = library("tokenizers", "a tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    except ValueError as error:
        raise InvalidInputError(f"tokenizer.json: {error}", field="tokenizer_json") from None
    backend.no_padding()
    backend.no_truncation()
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for token_id, token in sorted((files.config.get("added_tokens_decoder") or {}).items(), key=lambda i: int(i[0])):
        content = token["content"]
        if backend.token_to_id(content) is None:
            given = {flag: token[flag] for flag in flags if flag in token}
            backend.add_tokens([tokenizers.AddedToken(content, **given)])
        if backend.token_to_id(content) != int(token_id):
            has = f"{content!r}, which has the id {backend.token_to_id(content)} by tokenizer.json"
            raise InvalidInputError(f"added_tokens_decoder[{token_id!r}]: {has}", field="added_tokens_decoder")
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = [_content(files.config.get(name)) for name in NAMED_TOKENS]
    for name in filter(None, (*named, *_extra_tokens(files.config).values(), *_listed_tokens(files.config))):
        token = added.get(name) or tokenizers.AddedToken(name, normalized=False)
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])
    return backend


def _content(token: Any) -> str | None:
    """Return a special token as a string; configurations have a string or an object that contains one."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _extra_tokens(config: Mapping[str, Any]) -> dict[str, str | None]:
    extra = config.get("extra_special_tokens")
    return {name: _content(token) for name, token in extra.items()} if isinstance(extra, Mapping) else {}


def _listed_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key)
        yield from filter(None, map(_content, tokens if isinstance(tokens, list) else ()))


def _id_list(ids: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    listed = [listed] if isinstance(listed, int) else list(listed)
    for i, token_id in enumerate(listed):
        if not isinstance(token_id, int) or token_id < 0:
            raise InvalidInputError(f"token_ids[{i}]: expected a token id, got {token_id!r}", field="token_ids")
    return listed


def _templates(files: TokenizerFiles) -> dict[str, str]:
    """Return the chat templates by name; a single one is the default."""
    given = files.config.get("chat_template")
    named = {item["name"]: item["template"] for item in given} if isinstance(given, list) else {"default": given}
    named |= {"default": files.chat_template} if files.chat_template is not None else {}
    return {name: template for name, template in named.items() if template is not None}


def _from_hub(name: str, revision: str | None) -> Path:
    hub = library("huggingface_hub", f"{name!r} is not a directory, and loading from the Hugging Face hub")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:  # the hub's own errors are of these kinds
        raise TinkerError(
            f"{name!r} is not a directory, and downloading it from the Hugging Face hub failed: {error} "
            "Offline, pass a directory that contains tokenizer.json; for a gated model, set HF_TOKEN."
        ) from error


def _from_transformers(source: str | Path | TokenizerFiles, revision: str | None, trust_remote_code: bool) -> Any:
    auto = library("transformers", "prefer_transformers").AutoTokenizer
    if isinstance(source, TokenizerFiles):
        with tempfile.TemporaryDirectory() as directory:
            contents = (source.tokenizer_json, json.dumps(source.config).encode(), None, source.chat_template)
            for name, content in zip(FILES, contents, strict=True):
                if content is not None:
                    Path(directory, name).write_bytes(content.encode() if isinstance(content, str) else content)
            return auto.from_pretrained(directory)
    pinned = revision if revision is not None else PINNED_REVISIONS.get(str(source), "main")
    return auto.from_pretrained(str(source), revision=pinned, trust_remote_code=trust_remote_code)
