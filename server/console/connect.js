// How a client is connected: addresses, names of models, and settings to copy. Keys are named and
// never shown.

import { get, key } from "./api.js";
import { h, title, code, copyButton, fact, notice } from "./dom.js";
import { tab } from "./storage.js";

/** The variable of the environment in which the snippets expect a key. */
const KEY = "STEERSMAN_API_KEY";

/** A text as one word of a shell. */
const word = (text) =>
  /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
const quoted = JSON.stringify;

/** The limits of a model for opencode, which otherwise asks for replies of 32,000 tokens. */
const limitOf = (context) => ({ context, output: Math.min(32_000, Math.floor(context / 4)) });

/**
 * The clients: a name, what the text is, what to do with it, and how the text is made. `base` is
 * the server's address; `needsKey` says whether it asks for a key; `context` is the model's, in
 * tokens, or null while it is not known.
 */
const CLIENTS = [
  [
    "curl",
    "Shell",
    "Run it.",
    ({ base, model, needsKey }) => [
      `curl ${base}/v1/chat/completions \\`,
      '  -H "Content-Type: application/json" \\',
      needsKey && `  -H "Authorization: Bearer $${KEY}" \\`,
      `  -d ${word(quoted({ model, messages: [{ role: "user", content: "What is the capital of Italy?" }] }))}`,
    ],
  ],
  [
    "OpenAI for Python",
    "Python",
    "pip install openai",
    ({ base, model, needsKey }) => [
      needsKey && "import os\n",
      "from openai import OpenAI\n",
      `client = OpenAI(base_url="${base}/v1", api_key=${needsKey ? `os.environ["${KEY}"]` : '"none"'})`,
      "reply = client.chat.completions.create(",
      `    model=${quoted(model)},`,
      '    messages=[{"role": "user", "content": "What is the capital of Italy?"}],',
      ")",
      "print(reply.choices[0].message.content)",
    ],
  ],
  [
    "Anthropic for Python",
    "Python",
    "pip install anthropic",
    ({ base, model, needsKey }) => [
      needsKey && "import os\n",
      "from anthropic import Anthropic\n",
      `client = Anthropic(base_url="${base}", api_key=${needsKey ? `os.environ["${KEY}"]` : '"none"'})`,
      "reply = client.messages.create(",
      `    model=${quoted(model)},`,
      "    max_tokens=1000,",
      '    messages=[{"role": "user", "content": "What is the capital of Italy?"}],',
      ")",
      'print("".join(block.text for block in reply.content if block.type == "text"))',
    ],
  ],
  [
    "Ollama for Python",
    "Python",
    "pip install ollama",
    ({ base, model, needsKey }) => [
      needsKey && "import os\n",
      "from ollama import Client\n",
      needsKey
        ? `client = Client("${base}", headers={"Authorization": "Bearer " + os.environ["${KEY}"]})`
        : `client = Client("${base}")`,
      "reply = client.chat(",
      `    model=${quoted(model)},`,
      '    messages=[{"role": "user", "content": "What is the capital of Italy?"}],',
      ")",
      "print(reply.message.content)",
    ],
  ],
  [
    "LangChain",
    "Python",
    "pip install langchain-openai",
    ({ base, model, needsKey }) => [
      needsKey && "import os\n",
      "from langchain_openai import ChatOpenAI\n",
      "chat = ChatOpenAI(",
      `    model=${quoted(model)},`,
      `    base_url="${base}/v1",`,
      `    api_key=${needsKey ? `os.environ["${KEY}"]` : '"none"'},`,
      ")",
      'print(chat.invoke("What is the capital of Italy?").content)',
    ],
  ],
  [
    "Codex",
    "~/.codex/config.toml",
    "Add it to the file, then run codex.",
    ({ base, model, needsKey, context }) => [
      `model = ${quoted(model)}`,
      context && `model_context_window = ${context}`,
      'model_provider = "steersman"\n',
      "[model_providers.steersman]",
      'name = "Steersman"',
      `base_url = "${base}/v1"`,
      'wire_api = "responses"',
      needsKey && `env_key = "${KEY}"`,
    ],
  ],
  [
    "Claude Code",
    "Shell",
    "Run it in the folder of a project.",
    ({ base, model, needsKey, context }) => [
      `export ANTHROPIC_BASE_URL=${base}`,
      `export ANTHROPIC_AUTH_TOKEN=${needsKey ? `"$${KEY}"` : "none"}`,
      "# The names `opus`, `sonnet` and `haiku` stand for this model, too.",
      `export ANTHROPIC_MODEL=${word(model)} ANTHROPIC_DEFAULT_OPUS_MODEL=${word(model)} \\`,
      `  ANTHROPIC_DEFAULT_SONNET_MODEL=${word(model)} ANTHROPIC_DEFAULT_HAIKU_MODEL=${word(model)}`,
      context && `export CLAUDE_CODE_MAX_CONTEXT_TOKENS=${context}`,
      "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
      "claude",
    ],
  ],
  [
    "opencode",
    "opencode.json",
    "Put it into the folder of a project or ~/.config/opencode/, then run opencode.",
    ({ base, model, needsKey, context }) => [
      JSON.stringify(
        {
          provider: {
            steersman: {
              npm: "@ai-sdk/openai-compatible",
              name: "Steersman",
              options: { baseURL: `${base}/v1`, apiKey: needsKey ? `{env:${KEY}}` : "none" },
              models: {
                [model]: { name: model, limit: context ? limitOf(context) : undefined },
              },
            },
          },
          model: `steersman/${model}`,
        },
        null,
        2,
      ),
    ],
  ],
  [
    "aider",
    "Shell",
    "Run it in the folder of a project. aider warns that it does not know the model's context; that does no harm.",
    ({ base, model, needsKey }) => [
      `aider --model ${word(`openai/${model}`)} \\`,
      `  --openai-api-base ${base}/v1 \\`,
      `  --openai-api-key ${needsKey ? `"$${KEY}"` : "none"}`,
    ],
  ],
];

export function connect(element, state) {
  const base = location.origin;
  const needsKey = state.access.key !== "none" && !key.isLinked();
  const address = (name, value) =>
    fact(
      name,
      h(
        "span",
        { class: "actions" },
        h("code", {}, value),
        copyButton(() => value, `the address for ${name}`),
      ),
    );
  const model = h("select", { id: "connect-model" });
  const choices = h(
    "div",
    { class: "actions", role: "group", "aria-label": "Client" },
    CLIENTS.map(([name]) => h("button", { type: "button", onclick: () => choose(name) }, name)),
  );
  const snippet = h("div", { class: "snippet" });
  element.append(
    title(
      "Connect",
      "Settings for clients of OpenAI's, Anthropic's and Ollama's API.",
      h("a", { class: "button", href: "/docs" }, "Reference of the API"),
    ),
    h(
      "section",
      { class: "card", "aria-labelledby": "addresses" },
      h("h2", { id: "addresses" }, "Addresses"),
      h(
        "dl",
        { class: "facts wide" },
        address("OpenAI", `${base}/v1`),
        address("Anthropic, Ollama", base),
        fact("Key", needsKey ? `from the variable ${KEY}` : "none, or any"),
      ),
    ),
    ...(needsKey
      ? [
          notice(
            "info",
            h(
              "p",
              {},
              "The settings read the key from the environment. Set it where the client runs: ",
              h("code", {}, `export ${KEY}=…`),
            ),
            state.isOperator
              ? h(
                  "p",
                  {},
                  "Give clients a key of their own, not an operator's: create one under ",
                  h("a", { href: "#/keys" }, "Keys"),
                  ", or with ",
                  h("code", {}, "steersman keys create NAME"),
                )
              : null,
          ),
        ]
      : []),
    h(
      "section",
      { class: "card", "aria-labelledby": "settings" },
      h("h2", { id: "settings" }, "Settings"),
      h(
        "div",
        { class: "field" },
        h("label", { for: "connect-model" }, "Model, or model@profile"),
        model,
      ),
      choices,
      snippet,
    ),
  );

  let shown = tab.get("connect-client");
  const contexts = new Map();
  function draw() {
    const [name, kind, about, text] = CLIENTS.find(([known]) => known === shown) ?? CLIENTS[0];
    for (const button of choices.children)
      button.setAttribute("aria-pressed", String(button.textContent === name));
    const context = contexts.get(model.value) ?? null;
    const lines = text({ base, model: model.value, needsKey, context });
    snippet.replaceChildren(
      h("p", { class: "muted" }, about),
      code(kind, lines.filter(Boolean).join("\n")),
    );
  }
  function choose(name) {
    shown = name;
    tab.set("connect-client", name);
    draw();
  }
  model.addEventListener("change", draw);

  const abort = new AbortController();
  get("/v1/models", abort.signal)
    .then(({ data }) => {
      for (const { id, context } of data) contexts.set(id, context);
      model.append(...data.map(({ id }) => h("option", { value: id }, id)));
      draw();
    })
    .catch((error) => {
      if (!abort.signal.aborted) element.append(notice("bad", h("p", {}, error.message)));
    });
  return () => abort.abort();
}
