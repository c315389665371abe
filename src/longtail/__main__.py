"""`python -m longtail` and `torchrun … -m longtail` are the same program as `longtail`."""

import sys

from longtail.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
