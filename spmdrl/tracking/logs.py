"""Sets up one log file per rank. Only rank 0 shows log messages on the console, so that ranks' output does not mix."""

import logging
import os
import sys
from pathlib import Path

from spmdrl.config.dump import redact_text

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(run_dir: str | os.PathLike[str], rank: int) -> logging.Logger:
    """Send this rank's logs and Python warnings to `<run_dir>/logs/rank_<rank>.log`; return the `spmdrl` logger.

    The file receives messages at INFO and above from the `spmdrl` logger, and at WARNING and above from all others.
    Rank 0 also shows `spmdrl` warnings on stderr; other ranks show only uncaught exceptions. May be called again with
    another folder.
    """
    path = Path(run_dir) / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(_Redacting(FORMAT))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(_Stderr(logging.WARNING))

    root, ours, warnings_logger = logging.getLogger(), logging.getLogger("spmdrl"), logging.getLogger("py.warnings")
    for logger in (root, ours, warnings_logger):
        for old in [handler for handler in logger.handlers if getattr(handler, "_spmdrl", False)]:
            logger.removeHandler(old)
            old.close()
    for handler in handlers:
        handler._spmdrl = True  # type: ignore[attr-defined]
        ours.addHandler(handler)
    root.addHandler(file)
    warnings_logger.addHandler(file)
    ours.setLevel(logging.INFO)
    # If these loggers propagated to root, the file would get each line twice, and root may have a library's console
    # handler.
    ours.propagate = warnings_logger.propagate = False
    logging.captureWarnings(True)
    if rank != 0:
        # transformers creates a stderr handler on import; this variable sets the handler's level.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return ours


class _Redacting(logging.Formatter):
    """Formatter that removes secrets from messages and from tracebacks, which may show a URL with its password."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _Stderr(logging.Handler):
    """Handler that writes to the current sys.stderr, which the live panel replaces while it is shown.

    Records with `extra={"file_only": True}` go to the log file only.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        try:
            print(redact_text(f"{record.levelname.lower()}: {self.format(record)}"), file=sys.stderr, flush=True)
        except Exception:  # a handler must not raise into the code that logs
            self.handleError(record)
