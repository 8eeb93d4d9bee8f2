from lmeval_screener import Result as Result
from lmeval_screener import screen as screen

from lmeval_dispersion.auditing.calibration import calibrate as calibrate
from lmeval_dispersion.auditing.compare import compare_runs as compare_runs
from lmeval_dispersion.auditing.prediction import predict as predict
from lmeval_dispersion.auditing.ranking import rank as rank
from lmeval_dispersion.auditing.report import audit as audit
from lmeval_dispersion.errors import DispersionError as DispersionError
from lmeval_dispersion.geometry import Dispersion as Dispersion
from lmeval_dispersion.geometry import contributions as contributions
from lmeval_dispersion.geometry import dispersion_estimate as dispersion_estimate
from lmeval_dispersion.geometry import vendi_score as vendi_score
from lmeval_dispersion.geometry.dispersion import dispersion as dispersion
from lmeval_dispersion.harness.task import DispersionTask as DispersionTask
from lmeval_dispersion.installation import __version__ as __version__
from lmeval_dispersion.laboratory.comparison import compare_studies as compare_studies
from lmeval_dispersion.laboratory.context_clusters import clusters as clusters
from lmeval_dispersion.laboratory.perplexity_law import law as law
from lmeval_dispersion.laboratory.sublayer_choice import sublayers as sublayers
from lmeval_dispersion.laboratory.token_condensation import condensation as condensation
from lmeval_dispersion.model.capture import capture as capture
from lmeval_dispersion.model.loading import load_model as load_model
from lmeval_dispersion.store import read_store as open_store  # noqa: F401
from lmeval_dispersion.training import losses as losses
from lmeval_dispersion.training.regularizer import DispersionRegularizer as DispersionRegularizer
from lmeval_dispersion.training.trainer import DispersionConfig as DispersionConfig
from lmeval_dispersion.training.trainer import DispersionTrainer as DispersionTrainer
from lmeval_dispersion.training.trainer import DispersionTrainerMixin as DispersionTrainerMixin
from lmeval_dispersion.watching.watcher import DispersionCallback as DispersionCallback
from lmeval_dispersion.watching.watcher import Watcher as watch  # noqa: F401
