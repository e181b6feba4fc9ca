"""The model that HTTP clients of OpenAI's interface ask, asked in Anthropic's."""

from intarsia.tests.deploy.openai.conftest import api as api
