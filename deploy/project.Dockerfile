# Your project on top of Drivetrain's image; put it into your own repository.
#
#   docker build -f project.Dockerfile -t registry.example.com/team/gpt:1.4.2 .
#   drivetrain train --on kubernetes --image registry.example.com/team/gpt:1.4.2 --claim runs train.py
ARG BASE=drivetrain:0.2
FROM ${BASE}
USER root
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt
USER trainer
COPY . /app
