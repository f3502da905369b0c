import os, subprocess, time, signal
import pytest
from tests.launch_driver import Driver, wait_until
from hpc_rlhf.config import Het
from hpc_rlhf.launch.slurm import submit
from hpc_rlhf.launch.status import describe_run
from hpc_rlhf.run_dir import RunDir
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("tl", pathlib.Path(__file__).with_name("test_launch.py")); tl = importlib.util.module_from_spec(spec); spec.loader.exec_module(tl)
driver = tl.driver; make_plan=tl.make_plan
def log(d):
    for p in sorted((d.run/"attempts").glob("*/logs/*")):
        if "srun" in p.name or "superv" in p.name: print("-----",p.parent.parent.name, p.name); print(p.read_text())
def sacct(j): print(subprocess.run(["sacct","-X","-D","-n","-P","-j",j,"-o","JobID,State,ExitCode,Start,End,NodeList"],capture_output=True,text=True).stdout)
def test_killsup(driver):
    job=submit(make_plan(driver,Het.JOB)); tl.wait_all_started(driver)
    pids=[int(p.parent.name) for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"submitit.core._submit" in p.read_bytes() and str(driver.run).encode() in p.read_bytes()]
    print(pids); t=time.time()
    for p in pids: os.kill(p,9)
    wait_until(lambda: not driver.processes(),"gone",60); print("gone after",time.time()-t)
    print(tl.accounting(job.job_id,Het.JOB)); print(describe_run(RunDir(driver.run)))
def test_steps_term(driver):
    job=submit(make_plan(driver,Het.JOB)); tl.wait_all_started(driver)
    subprocess.run(["scancel","--signal=TERM",job.job_id]); t=time.time()
    print(tl.accounting(job.job_id,Het.JOB),time.time()-t); log(driver); print(describe_run(RunDir(driver.run)))
def test_scancel(driver):
    job=submit(make_plan(driver,Het.JOB)); tl.wait_all_started(driver)
    subprocess.run(["scancel",job.job_id]); t=time.time()
    print(tl.accounting(job.job_id,Het.JOB),time.time()-t); log(driver); print(describe_run(RunDir(driver.run)), job.watcher.get_state(job.job_id,mode="force"))
def test_node(driver, slurm_cluster):
    job=submit(make_plan(driver,Het.JOB)); tl.wait_all_started(driver)
    n=driver.started("learner-1")["world"]["node"]; t=time.time()
    slurm_cluster("kill-node",n[-1])
    try:
        wait_until(lambda: driver.started("learner-1",1),"again",120); print("again after",time.time()-t); sacct(job.job_id)
        driver.do("finish"); print(job.result(), tl.accounting(job.job_id,Het.JOB))
    finally:
        slurm_cluster("start-node",n[-1]); log(driver); sacct(job.job_id)
