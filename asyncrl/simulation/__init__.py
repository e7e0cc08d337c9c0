"""The real loop, gate and buffer over simulated parts: what a configuration would do, before it costs a GPU hour."""

from asyncrl.simulation.faults import FAULTS, Fault
from asyncrl.simulation.forecast import Forecast, simulate
from asyncrl.simulation.rates import SimulationRates, measured_rates

__all__ = ["FAULTS", "Fault", "Forecast", "SimulationRates", "measured_rates", "simulate"]
