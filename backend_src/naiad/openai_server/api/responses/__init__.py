"""OpenAI's Responses API: its bodies as types, and their translation to and from chats."""
