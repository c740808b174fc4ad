"""Keep what surrounds a run from changing it: hub access, launcher variables, progress bars of libraries.

Everything here sets environment variables and must run before lm-eval, datasets or transformers are imported.
"""

from __future__ import annotations

import os
import socket
from typing import Final
from urllib.parse import urlsplit

from diffulex.logger import get_logger

logger = get_logger(__name__)

#: lm-eval returns nothing unless ``LOCAL_RANK`` is 0, so a surrounding launcher's variables must not be seen.
LAUNCHER_VARIABLES: Final = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
OFFLINE_VARIABLES: Final = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXY_VARIABLES: Final = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_CONNECT_SECONDS: Final = 5.0


def leave_launcher() -> None:
    """The process no longer looks like one rank of a launcher; what was removed is logged once."""
    removed = [name for name in LAUNCHER_VARIABLES if os.environ.pop(name, None) is not None]
    if removed:
        logger.info(
            "ignoring %s of a surrounding launcher; the engine starts its own workers", ", ".join(removed)
        )


def quiet_libraries() -> None:
    """Libraries draw no progress bars of their own and start no tokenizer threads before a fork."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def prepare_hub(*, needed: bool) -> None:
    """Without need for the hub, or without a way to reach it, libraries work from local files only.

    Values that the user has set stay. Offline, a missing data set fails at once instead of after a minute of
    retries, and a cached one is used.
    """
    if needed and _is_reachable():
        return
    if needed:
        logger.warning("the hub cannot be reached; only data sets that are already cached can be used")
    for name in OFFLINE_VARIABLES:
        os.environ.setdefault(name, "1")


def _is_reachable() -> bool:
    """True when a connection opens, and behind a proxy, where this cannot be told from here."""
    if any(os.environ.get(name) for name in _PROXY_VARIABLES):
        return True
    parts = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((parts.hostname, parts.port or 443), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False
