"""What can this machine run, how, and how much of it? The report behind `topkapi doctor`."""

from topkapi.doctor.report import DoctorReport, examine

__all__ = ["DoctorReport", "examine"]
