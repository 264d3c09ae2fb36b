"""An HTTP server with the OpenAI API and Anthropic's Messages API.

It is a process of its own, and one more client of the engines.

`api` has the typed bodies of requests and answers and their translation, `engines` the connection to the
engines, `app` the routes.
"""
