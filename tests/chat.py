#!/usr/bin/env python3
"""Chats with the bundled model through a pseudo-terminal, as a user does: in the process, and on a running server.

    cargo build --bin steersman
    tests/chat.py [BINARY]

Prints what the terminal showed if it was not what is expected.
"""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Seconds to wait for a text.
PATIENCE = 120


class Terminal:
    """A program in a pseudo-terminal, and what it has printed."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self.shown = ""
        self.seen = 0
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, env)

    def read(self, seconds: float) -> bool:
        """Reads what comes within `seconds`; false at the end."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.terminal, 65536)
        except OSError:
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def expect(self, pattern: str) -> str:
        """Waits until `pattern` is shown, after what was expected before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := re.compile(pattern).search(self.shown, self.seen):
                self.seen = found.end()
                return found[0]
            if not self.read(0.2):
                break
        raise AssertionError(f"no {pattern!r} in:\n{self.shown[self.seen:]!r}\nafter:\n{self.shown[: self.seen]!r}")

    def enter(self, text: str) -> None:
        # Keys that come before the prompt are the terminal's: Ctrl-D would be lost.
        self.expect("> ")
        os.write(self.terminal, text.encode() + b"\r")

    def press(self, key: bytes) -> None:
        os.write(self.terminal, key)

    def end(self) -> int:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.read(0.2):
            pass
        if time.monotonic() >= end:
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def chat(binary: str, work: Path, env: dict[str, str]) -> None:
    terminal = Terminal([binary, "chat", "--local", "--temperature", "0"], env)
    terminal.expect("tiny-hybrid-4bit in this process")
    terminal.enter("What is the capital of Italy?")
    terminal.expect(r"The capital of Italy is Rome\.")
    terminal.expect(r"\d+ tokens.*, [\d.]+ s to the first")

    # Reasoning: dimmed, then folded, then unfolded.
    question = "Optimize this SQL query: SELECT * FROM items WHERE price = 26;"
    terminal.enter("/think on")
    terminal.expect("thinking is on")
    terminal.enter("/reset")
    terminal.expect("forgotten")
    terminal.enter(question)
    terminal.expect("\x1b\\[2m")
    terminal.expect("CREATE INDEX")
    terminal.expect("of reasoning")
    terminal.enter("/think")
    terminal.expect("reasoning is hidden")
    terminal.enter("/think")
    terminal.expect("\x1b\\[2m.{9,}")

    # Ctrl-C stops the reply, and the chat continues. A reply takes half a second: on a busy machine it may have ended
    # before the key arrives.
    for _ in range(20):
        terminal.enter("/reset")
        terminal.expect("forgotten")
        terminal.enter(question)
        terminal.expect("\x1b\\[2m.{3,}\x1b")
        terminal.press(b"\x03")
        if terminal.expect(r"stopped|s to the first") == "stopped":
            break
        terminal.expect("Ctrl-D leaves")
    else:
        raise AssertionError("Ctrl-C stopped no reply")
    terminal.enter("/think off")
    terminal.expect("thinking is off")
    terminal.enter("/system Answer briefly.")
    terminal.expect("system text is set")
    terminal.enter("/profile nobody")
    terminal.expect("there is no profile nobody; there are default")
    terminal.enter("What is the capital of France?")
    terminal.expect("Paris")
    terminal.expect("s to the first")
    saved = work / "saved.json"
    for words in [f"saved in {saved}", "File exists"]:
        terminal.enter(f"/save {saved}")
        terminal.expect(re.escape(words))
    roles = [message["role"] for message in json.loads(saved.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"], roles
    terminal.enter("/reset")
    terminal.expect("forgotten")
    terminal.enter(f"/load {saved}")
    terminal.expect("2 turns from")
    terminal.expect("> ")
    terminal.press(b"\x04")
    assert terminal.end() == 0, terminal.shown
    history = work / "data/chat_history"
    assert "capital of France" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0, oct(history.stat().st_mode)


def run(binary: str, work: Path, env: dict[str, str]) -> None:
    def ask(*arguments: str, stdin: str = "", status: int = 0) -> subprocess.CompletedProcess:
        command = [binary, "run", "--local", "tiny-hybrid-4bit", "--temperature", "0", *arguments]
        done = subprocess.run(command, input=stdin, env=env, text=True, capture_output=True, timeout=PATIENCE)
        assert done.returncode == status, done
        return done

    done = ask("What is the capital of Italy?")
    assert (done.stdout, done.stderr) == ("The capital of Italy is Rome.\n", ""), done
    done = ask(stdin="What is the capital of Italy?\n")
    assert done.stdout == "The capital of Italy is Rome.\n", done
    # Text that is piped in goes before the words of the command.
    both, alone = ask("Italy?", stdin="What is the capital of\n").stdout, ask("Italy?").stdout
    assert both == ask(stdin="What is the capital of\n\nItaly?").stdout != alone, (both, alone)
    schema = work / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": false}')
    done = ask("--json-schema", str(schema), "--think", "off", "-", stdin="Say seven.")
    assert json.loads(done.stdout) == {"n": 7}, done
    # The limit of a client counts the answer; the operator's counts the reasoning as well.
    done = ask("--max-tokens", "1", "--think", "on", "Think.")
    assert len(done.stdout) > 1 and "cut off" in done.stderr, done
    done = ask("--max-tokens", "1", "--json-schema", str(schema), "Say seven.", status=1)
    assert "cut off before it was complete" in done.stderr, done
    # A data folder that cannot be created says how to name another.
    done = subprocess.run([binary, "list", "--data-dir", str(schema)], env=env, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 1 and "STEERSMAN_DATA_DIR names another" in done.stderr, done
    config = work / "short.toml"
    config.write_text("[engine]\nmax_tokens = 1\n")
    done = ask("--config", str(config), "--think", "on", "Think.", status=1)
    assert done.stdout == "" and "no answer" in done.stderr, done


def get(url: str, key: str = "", body: dict | None = None) -> str:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return response.read().decode()


def served(binary: str, work: Path, env: dict[str, str]) -> None:
    """The commands talk to the server that runs, and its link makes an operator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"env": env, "stdin": subprocess.DEVNULL, "text": True, "capture_output": True, "timeout": PATIENCE}
    config, url = work / "served.toml", f"http://127.0.0.1:{port}"
    config.write_text(f"[server]\nport = {port}\n")
    server = Terminal([binary, "serve", "--config", str(config)], env)
    server.expect("Steersman serves tiny-hybrid-4bit")
    token = server.expect(r"once, at " + re.escape(url) + r"/#/enter/[\w-]+").rsplit("/", 1)[1]
    key = json.loads(get(f"{url}/v1/session", body={"token": token}))["key"]
    assert json.loads(get(f"{url}/v1/profiles", key))["access"]["key"] == "operator"
    assert token not in server.shown[server.seen :], "the log has the token"

    command = [binary, "run", "tiny-hybrid-4bit", "--config", str(config), "--temperature", "0"]
    done = subprocess.run([*command, "What is the capital of Italy?"], **quiet)
    assert (done.stdout, done.stderr) == ("The capital of Italy is Rome.\n", ""), done
    # Without a prompt a terminal gets a chat.
    terminal = Terminal(command, env)
    terminal.expect(re.escape(f"tiny-hybrid-4bit at {url}"))
    terminal.enter("What is the capital of France?")
    terminal.expect("Paris")
    terminal.expect("> ")
    terminal.press(b"\x04")
    assert terminal.end() == 0, terminal.shown
    # A name that neither the server nor this process knows ends the command, with the names that are served.
    names = ", ".join(model["id"] for model in json.loads(get(f"{url}/v1/models"))["data"])
    for name, words in [
        ("./absent.gguf", f"but {names}; nor can this process load it: ./absent.gguf does not exist"),
        ("tiny-hybird-4bit", f"but {names}; nor can this process load it: there is no model tiny-hybird-4bit; did you mean `tiny-hybrid-4bit`?"),
    ]:
        absent = [*command[:2], name, *command[3:], "Hi"]
        done = subprocess.run(absent, **quiet)
        said = f"the server at {url} does not serve {name}, {words}"
        assert done.returncode == 1 and said in done.stderr and "[models]" not in done.stderr, done
    # The words of a prompt need no quotes.
    done = subprocess.run([*command, *"What is the capital of Italy?".split()], **quiet)
    assert (done.stdout, done.stderr) == ("The capital of Italy is Rome.\n", ""), done
    # A model of this process runs beside the server: it says that state is not saved, and nothing of other files.
    assert "database" not in done.stderr, done
    local = [*command[:2], "--local", *command[2:], "What is the capital of Italy?"]
    done = subprocess.run(local, **quiet)
    assert done.stdout == "The capital of Italy is Rome.\n", done
    assert [line for line in done.stderr.splitlines() if "prefix store is in use" not in line] == [], done
    terminal = Terminal([binary, "chat", "--local", "--config", str(config), "--temperature", "0"], env)
    terminal.enter("What is the capital of Peru?")
    terminal.expect("Lima")
    terminal.expect("> ")
    terminal.press(b"\x04")
    assert terminal.end() == 0 and "database" not in terminal.shown, terminal.shown
    assert 'requests_total{status="2xx"} 3' in get(f"{url}/metrics"), "the server answered both"
    server.press(b"\x03")
    assert server.end() == 0, server.shown


def closed(binary: str, work: Path, env: dict[str, str]) -> None:
    """A server whose terminal is closed stops, with a configuration, too; with a terminal, SIGHUP reads that again."""
    config = work / "closed.toml"
    config.write_text("[server]\nport = 0\n")
    for options in ([], ["--config", str(config)]):
        server = Terminal([binary, "serve", "--port", "0", *options], env)
        server.expect("Steersman serves tiny-hybrid-4bit")
        os.kill(server.pid, signal.SIGHUP)
        server.expect("configuration reloaded" if options else "SIGHUP ignored")
        os.close(server.terminal)
        end = time.monotonic() + PATIENCE
        while os.waitpid(server.pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < end, "the server has no terminal and runs on"
            time.sleep(0.1)


def main() -> None:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    binary = sys.argv[1] if len(sys.argv) > 1 else str(target / "debug/steersman")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        env = {"HOME": folder, "TERM": "xterm", "STEERSMAN_DATA_DIR": str(work / "data")}
        for check in (chat, run, served, closed):
            start = time.monotonic()
            check(binary, work, env)
            print(f"{check.__name__}: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
