import sys

from specpipe.cli import main

sys.exit(main())
