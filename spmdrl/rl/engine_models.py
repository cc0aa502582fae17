"""Frozen models (judges and teachers) whose weights temporarily replace the policy's in the run's engine.

The policy's weights are restored before the policy samples again. All ranks of an engine must make the same calls;
different engines are independent.
"""

from pathlib import Path

from spmdrl.config.schema import Config
from spmdrl.hub.folder import fp8_blocks, plain_errors, read_config
from spmdrl.hub.resolve import named, resolve
from spmdrl.hub.tokenizer import check_same_tokens
from spmdrl.policy.contract import Policy
from spmdrl.session.device_table import Memory
from spmdrl.weights.folder import Tensors

UNSEEN = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings"),
        *("attention_dropout", "max_window_layers", "quantization_config", "id2label", "label2id"),
    }
)
"""Keys of config.json that may differ between a model and the policy, because they do not affect the engine's forward
pass."""


class EngineModels:
    """Frozen models with the policy's architecture, by name."""

    def __init__(self, cfg: Config, first: int, advice: str):
        """Create an empty collection; `open` adds models.

        first: weight version of the first model; each additional model gets the next lower number. The numbers are
        negative, so they differ from all policy versions. advice: suffix of the error message about a model that does
        not match the policy.
        """
        self.cfg, self.first, self.advice = cfg, first, advice
        self.folders: dict[str, Tensors] = {}
        self.versions: dict[str, int] = {}
        self.prefixes: dict[str, str] = {}
        """Maps a model's name to the prefix of its error messages, which gives the model's setting and path."""

    def open(self, name: str, path: str, setting: str) -> None:
        """Open a model's folder. setting: the setting that contains the path.

        Raises:
            ValueError: the model's tokenizer differs from the policy's, or its config.json describes another
                architecture.
        """
        trust, prefix = self.cfg.model.trust_remote_code, f"{setting} {path}"
        with named(setting):
            folder = resolve(path, trust)
            check_same_tokens(path, self.cfg.model.path, setting, trust)
            self._check_config(folder, resolve(self.cfg.model.path, trust), prefix)
            with plain_errors(folder):
                self.folders[name] = Tensors(folder, fp8_blocks(folder))
        self.prefixes[name], self.versions[name] = prefix, self.first - len(self.versions)

    def _check_config(self, folder: Path, policy: Path, prefix: str) -> None:
        trust = self.cfg.model.trust_remote_code
        mine, theirs = (
            {k: v for k, v in read_config(f, trust).to_dict().items() if k not in UNSEEN} for f in (folder, policy)
        )
        if odd := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
            raise ValueError(
                f"{prefix}: its config.json has {odd[0]} {mine.get(odd[0])!r}, the policy's {theirs.get(odd[0])!r}; "
                f"{self.advice}"
            )

    def check_policy(self, policy: Policy) -> None:
        """Check that all models have the same tensors as the policy.

        Raises:
            ValueError: a model lacks some tensors or has them in different shapes.
        """
        for name, tensors in self.folders.items():
            pieces = policy.pieces()
            with plain_errors(tensors.folder):
                odd = [p.name for p in pieces if p.name not in tensors or tensors.shape(p.name) != tuple(p.shape)]
            if odd:
                raise ValueError(
                    f"{self.prefixes[name]}: some of the policy's tensors are missing or have another shape (number: "
                    f"{len(odd)}, the first: {odd[0]}); {self.advice}"
                )

    def load(self, name: str, memory: Memory, role: str) -> int:
        """Load a model into the engine unless it is already loaded, and return its version.

        Collective over the ranks of the engine.
        """
        assert memory.engine
        version = self.versions[name]
        if memory.engine.version != version:
            memory.lend(self.folders[name], version, role)
        return version
