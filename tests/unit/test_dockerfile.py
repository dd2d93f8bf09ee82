"""Dockerfiles: what is read out of them, how variables are filled in, and how heredocs are rewritten."""

import os
import subprocess
from pathlib import Path

import pytest

from tmax.errors import BuildError
from tmax.sandbox.context import Context
from tmax.sandbox.dockerfile import (
    Arg,
    Copy,
    Env,
    From,
    Instruction,
    Recorded,
    Run,
    RunAs,
    Shell,
    Workdir,
    expand,
    expand_body,
    lower_heredocs,
    parse,
    split_words,
)
from tmax.sandbox.plan import FileStep, make_plan


def only(line: str) -> Instruction:
    """The second instruction of a Dockerfile that has two."""
    _, instruction = parse(f"FROM base\n{line}\n")
    return instruction


class TestParse:
    def test_every_instruction_has_its_type_and_line(self) -> None:
        text = (
            '# a comment\n\nfrom --platform=linux/amd64 debian:12 AS main\nWORKDIR /app\nenv A=1 B="x y"\nARG V W=2\n'
            'USER agent\nSHELL ["/bin/bash", "-c"]\nRUN ["echo", "a b"]\nCMD ["x"]\nEXPOSE 80\n'
        )
        assert parse(text) == (
            From(3, "debian:12", "main"),
            Workdir(4, "/app"),
            Env(5, (("A", "1"), ("B", '"x y"'))),
            Arg(6, (("V", None), ("W", "2"))),
            RunAs(7, "agent"),
            Shell(8, ("/bin/bash", "-c")),
            Run(9, ("echo", "a b")),
            Recorded(10, "CMD", '["x"]'),
            Recorded(11, "EXPOSE", "80"),
        )

    def test_continued_lines_lose_comments_and_empty_lines_but_nothing_else(self) -> None:
        text = "FROM base\nRUN one && \\\n    # gone\n\n    two \\  \n  three\nRUN four\n"
        assert parse(text)[1:] == (Run(2, "one &&     two   three"), Run(7, "four"))

    def test_another_escape_character(self) -> None:
        assert parse("# escape=`\nFROM base\nRUN a `\n b \\\nWORKDIR C:\\\n")[1:] == (
            Run(3, "a  b \\"), Workdir(5, "C:\\"),
        )  # fmt: skip

    def test_windows_line_ends_are_line_ends(self) -> None:
        assert parse("FROM base\r\nRUN a \\\r\n b\r\n")[1] == Run(2, "a  b")

    def test_old_form_of_env_takes_the_rest_of_the_line(self) -> None:
        assert only("ENV NAME some value = x") == Env(2, (("NAME", "some value = x"),))

    def test_copy_with_flags_and_in_json(self) -> None:
        assert only("COPY --link --chown=agent:agent --chmod=600 a b* /x/") == Copy(
            2, ("a", "b*"), (), "/x/", "agent:agent", "600"
        )
        assert only('ADD ["a b", "/c d"]') == Copy(2, ("a b",), (), "/c d", is_add=True)

    def test_a_run_that_is_a_heredoc_is_its_body(self) -> None:
        assert only("RUN <<EOF\na\n  # b \\\nEOF") == Run(2, "a\n  # b \\\n")
        assert only("RUN <<-'E-F'\n\ta\n\t\tb\n\tE-F") == Run(2, "a\nb\n")
        assert only("RUN <<EOF\n#!/bin/x\nEOF") == Run(2, "#!/bin/x\n", is_script=True)

    def test_a_run_with_heredocs_keeps_them_for_the_shell(self) -> None:
        text = 'RUN cat <<A > x && cat <<-"B" > y\n1\nA\n\t2\n\tB'
        assert only(text) == Run(2, 'cat <<A > x && cat <<-"B" > y\n1\nA\n\t2\n\tB\n')

    @pytest.mark.parametrize("line", ["RUN cat <<< word", "RUN echo $((1<<3))", "RUN echo '<<EOF'", "RUN x=1<<2"])
    def test_what_only_looks_like_a_heredoc_is_none(self, line: str) -> None:
        assert only(line) == Run(2, line.removeprefix("RUN "))

    def test_copy_of_heredocs(self) -> None:
        copy = only("COPY <<a <<'b' /x/\n$A\na\n$B\nb\n")
        assert isinstance(copy, Copy)
        assert [(doc.name, doc.body, doc.expand) for doc in copy.heredocs] == [
            ("a", "$A\n", True),
            ("b", "$B\n", False),
        ]
        assert (copy.sources, copy.target) == ((), "/x/")

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("RUN x\n", 1),
            ("", 1),
            ("FROM a\nFROM b\n", 2),
            ("FROM a\n\nNONSENSE x\n", 3),
            ("FROM a\nONBUILD RUN x\n", 2),
            ("FROM a\nRUN --mount=type=cache,target=/x y\n", 2),
            ("FROM a\nCOPY --from=b x y\n", 2),
            ("FROM a\nADD https://example.invalid/x /x\n", 2),
            ("FROM a\nCOPY x\n", 2),
            ("FROM a\nRUN <<EOF\nno end\n", 2),
            ("FROM a\nSHELL /bin/bash\n", 2),
            ("FROM a\nENV A\n", 2),
            ("FROM a\nRUN\n", 2),
        ],
    )
    def test_what_is_not_understood_is_refused_by_line(self, text: str, line: int) -> None:
        with pytest.raises(BuildError, match=rf"line {line}:"):
            parse(text)


class TestExpand:
    ENV = {"A": "1", "EMPTY": "", "P": "/x:/y"}

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("$A", "1"),
            ("${A}b", "1b"),
            ("$Ab", ""),
            ("\\$A", "$A"),
            ("'$A'", "$A"),
            ('"$A $P"', "1 /x:/y"),
            ("a\\ b", "a b"),
            ("${NONE:-d}", "d"),
            ("${EMPTY:-d}", "d"),
            ("${EMPTY-d}", ""),
            ("${A:+s}", "s"),
            ("${EMPTY:+s}", ""),
            ("${NONE:-${A}2}", "12"),
            ("$", "$"),
            ("5$", "5$"),
            ('"a\\"b\\n"', 'a"b\\n'),
            ("$P:/z", "/x:/y:/z"),
        ],
    )
    def test_variables_and_quotes(self, text: str, value: str) -> None:
        assert expand(text, self.ENV, 1) == value

    @pytest.mark.parametrize("text", ["${A", "${A#1}", "'open", '"open', "${NONE:?is missing}"])
    def test_what_cannot_be_expanded_is_refused(self, text: str) -> None:
        with pytest.raises(BuildError):
            expand(text, self.ENV, 1)

    def test_the_body_of_a_heredoc_keeps_its_quotes(self) -> None:
        assert expand_body("'$A' \"${NONE:-d}\" \\$A \\n \\\\\n", self.ENV, 1) == "'1' \"d\" $A \\n \\\n"

    def test_words_are_cut_outside_quotes(self) -> None:
        assert split_words("a 'b c' d\\ e \"f'g h\"") == ["a", "'b c'", "d\\ e", '"f\'g h"']


class TestLowerHeredocs:
    def test_without_heredocs_nothing_changes(self) -> None:
        text = "FROM a\r\nRUN x \\\n\n  y\n# end"
        assert lower_heredocs(text) == text

    def test_other_lines_stay_as_they_are(self) -> None:
        text = "# syntax=x\nFROM a\n# <<EOF\nRUN <<EOF\nx\nEOF\n\nRUN y \\\n  z\n"
        lowered = lower_heredocs(text)
        assert lowered.startswith("# syntax=x\nFROM a\n# <<EOF\nRUN eval ")
        assert lowered.endswith("\n\nRUN y \\\n  z\n")
        assert len(parse(lowered)) == 3

    @pytest.mark.parametrize(
        "body",
        [
            "echo plain\n",
            'echo "it\'s" \'100%\' \\\\ `echo tick` $((1 + 2)) "$HOME"\n',
            "cat <<'X'\n$y\tz\\n\nX\n",
            "for i in 1 2\ndo\n  echo $i # comment\ndone\n",
            "printf '%s\\n' a\\\n  b\n",
            "echo 'ü 🙂 \x01'\n",
            "exit 3\n",
            "",
        ],
    )
    def test_a_lowered_run_does_what_its_script_does(self, body: str) -> None:
        for wanted, text in (
            (body, f"RUN <<'EOF'\n{body}EOF\n"),
            (f"cat <<EOF\n{body}EOF\n", f"RUN cat <<EOF\n{body}EOF\n"),
        ):
            (line,) = [one for one in lower_heredocs(f"FROM a\n{text}").split("\n") if one.startswith("RUN")]
            lowered = shell(line.removeprefix("RUN "))
            assert (lowered.stdout, lowered.returncode) == (shell(wanted).stdout, shell(wanted).returncode)

    def test_a_lowered_script_is_run_by_its_own_interpreter(self) -> None:
        script = "#!/usr/bin/env python3\nimport sys\nprint('%s' % 7)\nsys.exit(4)\n"
        (_, run) = parse(lower_heredocs(f"FROM a\nRUN <<EOF\n{script}EOF\n"))
        assert isinstance(run, Run)
        assert isinstance(run.command, str)
        done = shell(run.command)
        assert (done.stdout, done.returncode) == (b"7\n", 4)

    def test_a_lowered_copy_writes_the_same_bytes(self, tmp_path: Path) -> None:
        body = "'q' \"d\" \\\\ `x` $(x) %s \\n ü\n\n  ${NONE:-default} $A\\$A\n\tend\n"
        text = f"FROM a\nCOPY --chmod=750 <<EOF {tmp_path}/sub/file\n{body}EOF\n"
        (run,) = [line for line in lower_heredocs(text).split("\n") if line.startswith("RUN")]
        assert shell(run.removeprefix("RUN "), A="value").returncode == 0
        written = tmp_path / "sub" / "file"
        assert written.read_text() == expand_body(body, {"A": "value"}, 1)
        assert written.stat().st_mode & 0o777 == 0o750

    def test_lowered_copies_into_a_directory_are_named_after_their_delimiters(self, tmp_path: Path) -> None:
        text = f"FROM a\nUSER agent\nCOPY <<'one.txt' <<two {tmp_path}/in/\n$x\none.txt\n2\ntwo\n"
        lowered = lower_heredocs(text)
        assert lowered.split("\n")[2] == "USER root"
        assert lowered.rstrip("\n").split("\n")[-1] == "USER agent"
        assert shell(lowered.split("\n")[3].removeprefix("RUN ")).returncode == 0
        assert (tmp_path / "in" / "one.txt").read_text() == "$x\n"
        assert (tmp_path / "in" / "two").read_text() == "2\n"

    def test_long_scripts_are_folded_into_lines_that_builders_take(self) -> None:
        body = "".join(f"# {number} comment\necho {number}\n" for number in range(9000))
        lowered = lower_heredocs(f"FROM a\nRUN <<EOF\n{body}EOF\n")
        assert max(len(line) for line in lowered.split("\n")) < 65_000
        (_, run) = parse(lowered)
        assert isinstance(run, Run)
        assert isinstance(run.command, str)
        assert run.command == parse(lower_heredocs(lowered))[1].command  # type: ignore[union-attr]
        assert run.command.count("comment") == 9000


def shell(script: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """What /bin/sh does with a script that it is given as a builder gives it."""
    return subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, env={**os.environ, **env}, check=False, timeout=20
    )


class TestPlan:
    @pytest.fixture
    def context(self, tmp_path: Path) -> Context:
        """A build context of a few files."""
        for name in ("Dockerfile", "a.txt", "b.txt", "dir/c.txt", "dir/deep/d.bin", "task.json", "keep.log", "x.log"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "link").symlink_to("a.txt")
        (tmp_path / ".dockerignore").write_text("*.log\n!keep.log\n")
        return Context(tmp_path)

    def files(self, context: Context, lines: str) -> list[FileStep]:
        """The files that some lines after FROM write."""
        return [file for step in make_plan(parse(f"FROM base\n{lines}\n"), context).steps for file in step.files]

    def test_directories_and_environment_grow_as_the_build_goes_on(self, context: Context) -> None:
        text = (
            "ARG V=1\nFROM base\nARG V\nARG W=${V}2\nENV A=$W PATH=/app:$PATH\nENV A=x B=$A\n"
            "WORKDIR /a/$B\nWORKDIR ../c\nRUN x\n"
        )
        plan = make_plan(parse(text), context)
        assert plan.workdir == "/a/c"
        assert plan.env == {
            "A": "x", "B": "12", "PATH": "/app:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }  # fmt: skip
        assert plan.steps[-1].cwd == "/a/c"
        assert plan.steps[-1].env == {**plan.env, "V": "1", "W": "12"}
        assert plan.steps[-1].run == ("/bin/sh", "-c", "x")

    def test_one_file_may_be_renamed_and_many_go_into_a_directory(self, context: Context) -> None:
        (one,) = self.files(context, "COPY a.txt /x/new")
        assert (one.path, one.name, one.source, one.mode) == ("/x/new", "a.txt", "a.txt", None)
        assert [(file.path, file.source) for file in self.files(context, "COPY a.txt b.txt /x")] == [
            ("/x/", "a.txt"), ("/x/", "b.txt"),
        ]  # fmt: skip
        assert self.files(context, "WORKDIR /w\nCOPY a.txt ./")[1].path == "/w/"

    def test_a_directory_gives_what_is_in_it(self, context: Context) -> None:
        found = self.files(context, "COPY dir /x")
        assert [(file.kind, file.path, file.source) for file in found] == [
            ("directory", "/x", None), ("file", "/x/c.txt", "dir/c.txt"), ("directory", "/x/deep", None),
            ("file", "/x/deep/d.bin", "dir/deep/d.bin"),
        ]  # fmt: skip

    def test_the_whole_context_is_what_may_be_sent(self, context: Context) -> None:
        found = {file.path: file for file in self.files(context, "COPY . /x") if file.kind == "file"}
        assert set(found) == {
            f"/x/{name}"
            for name in (".dockerignore", "Dockerfile", "a.txt", "b.txt", "dir/c.txt", "dir/deep/d.bin", "keep.log",
                         "link")
        }  # fmt: skip
        assert found["/x/link"].link == "a.txt"

    def test_patterns_match_within_one_directory(self, context: Context) -> None:
        assert [file.source for file in self.files(context, "COPY [ab].t?t dir/*.txt /x/")] == [
            "a.txt", "b.txt", "dir/c.txt",
        ]  # fmt: skip

    @pytest.mark.parametrize("source", ["none", "*.none", "../x", "dir/../../x", "task.json", "x.log"])
    def test_what_is_not_in_the_context_is_refused(self, context: Context, source: str) -> None:
        with pytest.raises(BuildError, match="line 2"):
            self.files(context, f"COPY {source} /x")

    def test_archives_are_not_added(self, context: Context) -> None:
        (context.root / "a.tar.gz").write_bytes(b"")
        with pytest.raises(BuildError):
            self.files(Context(context.root), "ADD a.tar.gz /x")
