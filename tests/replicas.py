"""Two servers behind HAProxy, as `configs/haproxy.cfg` has it: a conversation stays where its state is.

    python tests/replicas.py target/debug/steersman

`haproxy` is on PATH. Prints for each turn which server answered, and how much of the prompt was saved there.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT, ROUTER = "sk-client", "sk-router"
CAPITALS = {
    "Italy": "Rome", "Norway": "Oslo", "France": "Paris", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
}
TURNS = 3
#: With a question it has the 16 tokens (`store.min_tokens`) from which a prefix is saved, and alone it has fewer:
#: conversations share nothing that is saved.
SYSTEM = "You are a helpful assistant."
#: Tokens that the template puts behind the messages of a prompt, and not into the next one.
GENERATION_PROMPT = 8
PATIENCE_S = 600


def get(url, key=None):
    """The status and the JSON of a route."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


class Replica:
    """A server with a data folder of its own."""

    def __init__(self, name, binary, folder):
        self.name = name
        self.log = Path(folder, f"{name}.log")
        config = Path(folder, "steersman.toml")
        config.write_text(f'[server]\nport = 0\napi_keys = ["{CLIENT}"]\nadmin_keys = ["{ROUTER}"]\n')
        command = [binary, "serve", "--config", config, "--data-dir", Path(folder, name)]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait(self):
        """Waits until it answers."""
        end = time.time() + PATIENCE_S
        while " at http://" not in self.log.read_text():
            assert self.process.poll() is None and time.time() < end, self.log.read_text()
            time.sleep(0.2)
        self.url = self.log.read_text().split(" at ")[1].split("/v1")[0]
        while get(f"{self.url}/health")[0] != 200:
            assert time.time() < end, self.log.read_text()
            time.sleep(0.2)

    def held(self):
        """The names of the conversations that it holds."""
        status, health = get(f"{self.url}/health", ROUTER)
        assert status == 200, status
        return {entry["prefix"] for entry in health["engines"][0]["prefixes"]["held"]}

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


class Proxy:
    """HAProxy before these replicas."""

    def __init__(self, replicas, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = (ROOT / "configs/haproxy.cfg").read_text()
        addresses = [f"127.0.0.1:{port}"] + [replica.url.removeprefix("http://") for replica in replicas]
        for own, address in zip(("8080", "11436", "11437"), addresses, strict=True):
            line = re.compile(rf"^( +(?:bind|server \w+) )127\.0\.0\.1:{own}$", re.M)
            config, count = line.subn(rf"\g<1>{address}", config)
            assert count == 1, f"{own} stands {count} times in configs/haproxy.cfg"
        path = Path(folder, "haproxy.cfg")
        path.write_text(config)
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(["haproxy", "-db", "-f", path])
        end = time.time() + 60
        while get(f"{self.url}/health")[0] != 200:
            assert self.process.poll() is None and time.time() < end, "haproxy does not answer"
            time.sleep(0.1)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


class Conversation:
    """A conversation of a client that sends back the name of the last reply, if it `echoes`."""

    def __init__(self, url, first, stream, echoes=True):
        self.url, self.first, self.stream, self.echoes = url, first, stream, echoes
        self.messages, self.name, self.prompt = [{"role": "system", "content": SYSTEM}], None, 0

    def ask(self):
        """Asks for the next capital; returns how many tokens of the prompt were saved."""
        countries = list(CAPITALS)
        country = countries[(self.first + (len(self.messages) - 1) // 2) % len(countries)]
        self.messages.append({"role": "user", "content": f"What is the capital of {country}?"})
        body = {
            "messages": self.messages, "temperature": 0, "max_tokens": 60, "stream": self.stream,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {CLIENT}"}
        if self.name and self.echoes:
            headers["x-steersman-prefix"] = self.name
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            name = reply.headers["x-steersman-prefix"]
            answer, usage = self.read(reply)
        assert name and CAPITALS[country] in answer, f"{country}: {answer!r}, {name}"
        self.messages.append({"role": "assistant", "content": answer})
        self.name, self.last_name = name, self.name
        self.prompt, self.last_prompt = usage["prompt_tokens"], self.prompt
        return usage["prompt_tokens_details"]["cached_tokens"]

    def read(self, reply):
        if not self.stream:
            body = json.load(reply)
            return body["choices"][0]["message"]["content"], body["usage"]
        lines = reply.read().decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        chunks = [json.loads(text) for text in data if text != "[DONE]"]
        pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        return "".join(pieces), chunks[-1]["usage"]

    def resume(self):
        """The next turn, which resumes where the last one was answered."""
        cached = self.ask()
        assert self.name == self.last_name, f"another server answered: {self.last_name}, then {self.name}"
        assert cached >= self.last_prompt - GENERATION_PROMPT > 0, (
            f"{cached} tokens were saved of a prompt that continues one of {self.last_prompt}"
        )
        return cached


def holder(replicas, name):
    """The one replica that holds a conversation."""
    [one] = [replica for replica in replicas if name in replica.held()]
    return one


def main():
    binary = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        replicas = [Replica(name, binary, folder) for name in ("one", "two")]
        started = list(replicas)
        try:
            for replica in replicas:
                replica.wait()
            proxy = Proxy(replicas, folder)
            started.append(proxy)
            # The list needs a key.
            status, health = get(f"{proxy.url}/health")
            assert status == 200 and health["engines"][0]["prefixes"]["held"] is None, health

            # A client that sends no name back is answered by either.
            forgetful = Conversation(proxy.url, 0, stream=False, echoes=False)
            names = set()
            for _ in range(4):
                forgetful.ask()
                names.add(forgetful.name)
            assert len(names) == 2, names
            assert len({holder(replicas, name).name for name in names}) == 2, names

            # Turn by turn, so that others come between the turns of each: an odd number, since servers that take turns
            # would else get the same conversations each time.
            conversations = [Conversation(proxy.url, first, stream=first % 2 == 1) for first in range(5)]
            for conversation in conversations:
                conversation.ask()
            for turn in range(1, TURNS):
                for number, conversation in enumerate(conversations):
                    cached = conversation.resume()
                    server = holder(replicas, conversation.name).name
                    tokens = f"{cached} of {conversation.prompt} tokens saved"
                    print(f"turn {turn + 1} of conversation {number}: server {server}, {tokens}")
            served = {replica.name: [] for replica in replicas}
            for conversation in conversations:
                served[holder(replicas, conversation.name).name].append(conversation)
            assert all(served.values()), {name: len(own) for name, own in served.items()}

            # One dies: the other answers its conversations, and holds them from then on.
            dead, alive = replicas
            dead.process.kill()
            dead.process.wait()
            for conversation in served[dead.name]:
                conversation.ask()
                assert conversation.name != conversation.last_name, conversation.name
                assert conversation.name in alive.held(), conversation.name
                conversation.resume()
            for conversation in served[alive.name]:
                conversation.resume()
            print(f"after the end of {dead.name}: {len(served[dead.name])} conversations continued at {alive.name}")
        finally:
            for one in reversed(started):
                one.stop()


main()
