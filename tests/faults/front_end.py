"""A front end in a process of its own, to be killed: reads the engine's address, prints its own."""

import asyncio
import json
import sys

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.proto.channel import Address


async def main() -> None:
    host, port, secret = json.loads(sys.stdin.readline())
    client = await EngineClient.connect(Address(host, port, bytes.fromhex(secret)))
    server = GrpcServer(FrontEnd(client, Tokenizer.load(str(DEMO_MODEL_DIR))))
    print(await server.start(port=0), flush=True)
    await client.connection.wait_failed()


if __name__ == "__main__":
    asyncio.run(main())
