"""Roles on other hosts: they dial the orchestrator, and what it says to their services travels over what they dialled.

    orchestrator                                        a role's host
    pool -> 127.0.0.1:p -> rendezvous  <== token, TLS ==  role -> 127.0.0.1:q, vLLM or whatever it serves

A role's service is started as the orchestrator would have started it at home, and listens on its host's loopback alone.
Each connection to it is a channel of its own: the rendezvous asks for one over the role's conversation, and the role
dials it. So one port of one host is reached over the network, whoever comes there has the token, and an engine's
developer routes are never exposed. Channels on one connection, one behind another, were rejected: a lost packet of one
request would hold up all, and a slow reader would need windows of our own.
"""

from asyncrl.roles.attendance import Door, Role, Served, attend
from asyncrl.roles.guests import Guest
from asyncrl.roles.rendezvous import Rendezvous
from asyncrl.roles.settings import KINDS, RoleSettings

__all__ = ["KINDS", "Door", "Guest", "Rendezvous", "Role", "RoleSettings", "Served", "attend"]
