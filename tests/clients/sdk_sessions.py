"""One question to an agent of the OpenAI Agents SDK or of Pydantic AI, run in an environment that has the SDK."""

import os
import sys
from pathlib import Path

#: An agent's instructions are long: here a page of the documentation.
INSTRUCTIONS = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()


def read_file(path: str, first_line: int = 1) -> str:
    """Return the text of a file from a line on."""
    return Path(path).read_text().splitlines()[first_line - 1]


def edit_file(path: str, old: str, new: str) -> str:
    """Replace `old` by `new` in a file."""
    return f"{path}: replaced {len(old)} by {len(new)} characters"


def openai_agents(question: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    tools = [function_tool(read_file), function_tool(edit_file)]
    agent = Agent("Helper", instructions=INSTRUCTIONS, model="tiny", tools=tools)
    return Runner.run_sync(agent, question).final_output


def pydantic_ai(question: str) -> str:
    from pydantic_ai import Agent

    agent = Agent("openai-chat:tiny", instructions=INSTRUCTIONS, tools=[read_file, edit_file])
    return agent.run_sync(question).output


if __name__ == "__main__":
    name, url, asked = sys.argv[1:]
    os.environ.update(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="none")
    print({"openai-agents": openai_agents, "pydantic-ai": pydantic_ai}[name](asked))
