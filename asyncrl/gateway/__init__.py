"""The gateway: an HTTP face before the engines, whose sessions become trajectories."""

from asyncrl.gateway.admission import CacheUse, cache_use_of
from asyncrl.gateway.gateway import Gateway, GatewayStatistics, NeedsGateway
from asyncrl.gateway.http import Answer, Refused, Request, Route, Routes, json_answer
from asyncrl.gateway.operating import Operating, shown_trajectory
from asyncrl.gateway.record import Record
from asyncrl.gateway.server import HTTPServer
from asyncrl.gateway.session import Session
from asyncrl.gateway.settings import ForeignSampling, GatewaySettings, ToolFormat

__all__ = [
    "Answer",
    "CacheUse",
    "ForeignSampling",
    "Gateway",
    "GatewaySettings",
    "GatewayStatistics",
    "HTTPServer",
    "NeedsGateway",
    "Operating",
    "Record",
    "Refused",
    "Request",
    "Route",
    "Routes",
    "Session",
    "ToolFormat",
    "cache_use_of",
    "json_answer",
    "shown_trajectory",
]
