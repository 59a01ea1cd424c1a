"""The devices of this process: what each says about itself, and the layers of rules that its table is made of."""
