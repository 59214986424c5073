"""An RTSP server for the end-to-end tests: a tone in G.711, as /tone, over UDP from the data ports that are given.

Usage: server.py ADDRESS PORT FIRST_DATA_PORT LAST_DATA_PORT
"""

import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer

TONE = "( audiotestsrc is-live=true ! audio/x-raw,rate=8000,channels=1 ! alawenc ! rtppcmapay name=pay0 pt=8 )"

address, port, first, last = sys.argv[1:]
Gst.init(None)
server = GstRtspServer.RTSPServer()
server.set_address(address)
server.set_service(port)
data_ports = GstRtspServer.RTSPAddressPool()
is_ipv6 = ":" in address
own = GstRtspServer.RTSP_ADDRESS_POOL_ANY_IPV6 if is_ipv6 else GstRtspServer.RTSP_ADDRESS_POOL_ANY_IPV4
if not data_ports.add_range(own, own, int(first), int(last), 0):
    sys.exit(f"no data ports {first} to {last}")
tone = GstRtspServer.RTSPMediaFactory()
tone.set_launch(TONE)
tone.set_address_pool(data_ports)
server.get_mount_points().add_factory("/tone", tone)
if server.attach(None) == 0:
    sys.exit(f"can't listen on {address} port {port}")
print("serving", flush=True)
GLib.MainLoop().run()
