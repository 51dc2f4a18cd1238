from trainer.config import Config as Config
from trainer.config.walk import load_config as load_config
from trainer.engine import Engine as Engine
from trainer.job.ranks import Ranks as Ranks
from trainer.mesh.mesh import ProcessMesh as ProcessMesh
from trainer.model.microbatch import Batch as Batch
from trainer.pipeline.draw import draw as draw
from trainer.pipeline.schedules import gpipe as gpipe
from trainer.pipeline.schedules import one_f_one_b as one_f_one_b
from trainer.pipeline.schedules import with_transfers as with_transfers
from trainer.pipeline.schedules import zb_h1 as zb_h1
from trainer.pipeline.simulate import costs as costs
from trainer.pipeline.simulate import simulate as simulate
from trainer.run.continuation import Until as Until
from trainer.run.evaluate import evaluate_checkpoint as evaluate_checkpoint
from trainer.run.generate import Generation as Generation
from trainer.run.generate import Piece as Piece
from trainer.run.generate import generate_text as generate_text
from trainer.run.inference import TrainedModel as TrainedModel
from trainer.run.inference import open_checkpoint as open_checkpoint
from trainer.run.loop import train as train
from trainer.run.sampling import Sampling as Sampling
from trainer.verdict import StepStats as StepStats

__version__: str
