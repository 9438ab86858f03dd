"""The command line: the one module that knows how typer works.

Words that are plainly right are read without it. It helps, completes, and says what is wrong with
words; imports are local, so that no process waits for more than it needs.
"""
# ruff: noqa: PLC0415

import os

TYPE_CHECKING = False  # as type checkers see it
if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from meshwright.planner.options import Command, Option

# Set by a shell that completes words (`_main_shell_completion` of typer/core.py).
COMPLETION = "_MESHWRIGHT_COMPLETE"
INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of the signal


class UsageError(ValueError):
    """Error of the words of a command, in one line."""


def run_command_line(
    texts: "Mapping[str, str]", command: "Callable[[str], Command]", words: "Sequence[str]"
) -> int:
    """Run the command that *words* name and return its exit status; no words show the help.

    Args:
        texts: What help says of each command there is, in its order.
        command: Makes the one of a name.
        words: What was typed.

    Raises:
        UsageError: If the words are not what a command takes.
        PlanError: If a value is not what its option takes.
        KeyboardInterrupt: If the user stops the command.
    """
    commands: dict[str, Command | None] = dict.fromkeys(texts)
    # While a shell completes words typer answers, and nothing is run.
    is_completed = bool(os.environ.get(COMPLETION))
    if words and words[0] in texts:
        return _run_one(texts, words[0], command(words[0]), words, is_completed=is_completed)
    if words and not words[0].startswith("-"):
        from meshwright.hwprofiles import shown, suggestion

        raise UsageError(f"unknown command {shown(words[0])}; {suggestion(words[0], texts)}")
    # Completion needs the options of all commands, help their names alone.
    if is_completed or words[:1] == ["--"]:
        commands = {name: command(name) for name in texts}
    return _run_app(texts, commands, words)


def _run_one(
    texts: "Mapping[str, str]",
    name: str,
    command: "Command",
    words: "Sequence[str]",
    *,
    is_completed: bool,
) -> int:
    from meshwright.planner.options import release_claims

    try:
        typed = command.typed(words[1:])
        if typed is None or is_completed:
            return _run_app(texts, {name: command}, words)
        return command(typed)
    finally:
        release_claims()


def _run_app(
    texts: "Mapping[str, str]", commands: "Mapping[str, Command | None]", words: "Sequence[str]"
) -> int:
    """Run the command that *words* name and return its exit status; no words show the help.

    Args:
        texts: What help says of each command there is.
        commands: Those that typer needs to know; None where their help alone is asked for.
        words: What was typed.

    Raises:
        UsageError: If the words are not what a command takes.
        KeyboardInterrupt: If the user stops the command.
    """
    from typing import cast

    import typer
    from typer.main import get_group, get_install_completion_arguments

    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Lay out the training of a large model on a cluster: search, simulate, prove.",
        epilog="meshwright --version shows the version.",
    )
    for name, command in commands.items():
        between = command is None or not command.ends_in_words
        settings = {"allow_interspersed_args": between}
        app.command(name, help=texts[name], context_settings=settings)(_signed(command))
    group = get_group(app)
    if len(commands) == len(texts):  # typer adds these itself where one command is no group
        group.params += get_install_completion_arguments()
    # Of typer's UsageError the module differs between versions, the place above BadParameter not.
    usage_error = cast("type[typer.BadParameter]", typer.BadParameter.mro()[2])
    try:
        status = group.main(
            args=list(words) or ["--help"], prog_name="meshwright", standalone_mode=False
        )
    except usage_error as error:
        # typer begins its messages with a capital, ours follow `error: `.
        text = error.format_message()
        raise UsageError(text[:1].lower() + text[1:]) from None
    except typer.Abort:
        # typer turns Ctrl-C into Abort, or into a status where it is not standalone.
        raise KeyboardInterrupt from None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return int(status or 0)


def _signed(command: "Command | None") -> "Callable[..., int]":
    """Return a command as typer wants it: a function with a parameter for each option.

    Typer sees texts and flags; the texts are read by the command, so that a mistake has our words.
    """
    import inspect

    parameters = [] if command is None else [_parameter(each) for each in command.options]

    def run(**typed: object) -> int:
        assert command is not None  # what is only listed is not run
        return command(typed)

    target: Any = run  # a function's attributes, which its type does not know
    target.__signature__ = inspect.Signature(parameters)
    target.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(option: "Option") -> "inspect.Parameter":
    """Return an option as a parameter of texts and flags alone."""
    import inspect
    from typing import Annotated

    import typer

    metavar, text = option.metavar, option.help
    default: object = option.default
    kind: object = str | None
    info: object
    if option.is_argument:
        info = typer.Argument(metavar=metavar, help=text)
    elif option.kind is bool:
        info = typer.Option(option.flags, help=text, show_default=False)
    else:
        info = typer.Option(*option.spellings, metavar=metavar, help=text)
    if option.kind is list:
        kind = list[str] | None
    elif option.kind is bool:
        kind = bool | None if default is None else bool
    elif default is not None:
        default = str(default)
    return inspect.Parameter(
        option.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )
