"""Arguments of the commands that train a model on data, named as `package.module:function`."""

import argparse

from kbatch.cli.named_function import check_name

BUILD, DATA = "MODULE:BUILD", "--data"


def add_model_arguments(parser: argparse.ArgumentParser, *, data: str) -> None:
    """Adds the build function and `--data`, of which `data` tells what it may name."""
    parser.add_argument("build", metavar=BUILD, help="function that returns the compiled model")
    parser.add_argument(DATA, required=True, metavar="MODULE:DATA", help=data)


def check_model_arguments(options: argparse.Namespace) -> None:
    """Checks both names before TensorFlow is started, which takes seconds.

    Raises:
        ValueError: If one is no name, or its package does not exist.
    """
    check_name(options.build, BUILD)
    check_name(options.data, DATA)
