"""How the Triton models of one served NAME are called: the ensemble has the name itself, the others a suffix."""

PREPROCESSING = "-preprocessing"
ENGINE = "-tensorrt_llm"
POSTPROCESSING = "-postprocessing"
EMBEDDING = "-embedding"
