"""``python -m diffulex_bench`` is ``diffulex-bench``."""

import sys

from diffulex_bench.main import main

if __name__ == "__main__":
    sys.exit(main())
