"""Which clients there are, and of which packages each one's environment is made."""

from pathlib import Path
from typing import Literal, NamedTuple

PROGRAMS = Path(__file__).parent / "programs"


AGENT_TOKENS = 262_144
"""Coding agents begin with instructions of 40,000 to 80,000 bytes, and a token is a byte."""


class Client(NamedTuple):
    """One client program. Its probes are in `programs/try_NAME`, `-` written as `_`."""

    name: str
    source: Literal["pip", "npm"]
    packages: tuple[str, ...]  # with the versions that are wanted; the first is the one that the report names
    length_tokens: int = 32_768  # of the model that it asks

    @property
    def program(self) -> Path:
        ending = "py" if self.source == "pip" else "mjs"
        return PROGRAMS / f"try_{self.name.replace('-', '_')}.{ending}"


CLIENTS = (
    Client("openai", "pip", ("openai>=3,<4",)),
    Client("anthropic", "pip", ("anthropic>=2.14,<3",)),
    Client("pydantic-ai", "pip", ("pydantic-ai-slim[openai]>=2,<3",)),
    Client("litellm", "pip", ("litellm[proxy]>=1.100,<2",)),
    Client("openai-agents", "pip", ("openai-agents>=0.24,<1",)),
    Client("instructor", "pip", ("instructor>=1.17,<2",)),
    Client("langchain", "pip", ("langchain>=1.4,<2", "langchain-openai>=1.7,<2")),
    Client("openai-npm", "npm", ("openai@^6", "zod@^4")),
    Client("anthropic-npm", "npm", ("@anthropic-ai/sdk@^1",)),
    Client("llamaindex", "pip", ("llama-index-core>=0.14,<1", "llama-index-llms-openai-like>=0.8,<1")),
    Client("dspy", "pip", ("dspy>=3.4,<4",)),
    Client("smolagents", "pip", ("smolagents[openai]>=1.26,<2",)),
    Client("haystack", "pip", ("haystack-ai>=3.4,<4",)),
    Client("autogen", "pip", ("autogen-agentchat>=0.7,<1", "autogen-ext[openai]>=0.7,<1")),
    Client("semantic-kernel", "pip", ("semantic-kernel>=1.45,<2",)),
    Client("crewai", "pip", ("crewai>=1.15,<2",)),
    Client("llm", "pip", ("llm>=0.36,<1",)),
    Client("aider", "pip", ("aider-chat>=0.86,<1",)),
    Client("vercel-ai", "npm", ("ai@^6", "@ai-sdk/openai-compatible@^2", "zod@^4")),
    Client("langchain-js", "npm", ("@langchain/openai@^1", "@langchain/core@^1", "zod@^4")),
    Client("lm-eval", "pip", ("lm-eval[api]>=0.4.13,<1", "transformers>=5,<6")),
    Client("guidellm", "pip", ("guidellm>=0.8,<0.9",)),
    Client("genai-bench", "pip", ("genai-bench>=0.0.5,<1",)),
    Client("promptfoo", "npm", ("promptfoo@^0.121",)),
    Client("claude-code", "npm", ("@anthropic-ai/claude-code@^2.1.332",), AGENT_TOKENS),
    Client("codex", "npm", ("@openai/codex@^0.171",), AGENT_TOKENS),
    Client("opencode", "npm", ("opencode-ai@^1.18",), AGENT_TOKENS),
    Client("qwen-code", "npm", ("@qwen-code/qwen-code@^0.15",), AGENT_TOKENS),
    Client("grpc-js", "npm", ("@grpc/grpc-js@^1.14", "grpc-js-reflection-client@^1.4", "@grpc/proto-loader@^0.8")),
)
