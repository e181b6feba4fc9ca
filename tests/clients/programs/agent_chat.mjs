// How the answers of coding agents that speak chat are held to a form.
import { SENTENCE, only } from "./agent.mjs";

export const results = (asked) => asked.messages.filter(({ role }) => role === "tool");

export function inWords(asked) {
  const schema = { name: "said", strict: true, schema: { const: SENTENCE } };
  return { ...asked, tool_choice: undefined, tools: undefined, response_format: { type: "json_schema", json_schema: schema } };
}

// The first answer calls a tool with these arguments, the next one is in words. Requests without tools are in words.
export function calls(name, given) {
  return (asked) => {
    if (!asked.tools?.length || results(asked).length) return inWords(asked);
    const tools = asked.tools.map((tool) =>
      tool.function.name === name ? { ...tool, function: { ...tool.function, parameters: only(given) } } : tool,
    );
    return { ...asked, tools, tool_choice: { type: "function", function: { name } } };
  };
}
