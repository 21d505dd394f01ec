# 500 derivations in 10 layers of 50, each needing four of the layer below: something to measure with.
# Every name carries a salt, and a new salt makes 500 derivations that nobody has built. The salt is the
# flake input `salt`, which is this flake itself unless it is overridden. For a fresh run either copy this
# folder and write another word into the file `salt`, or pass --override-input salt URL with any flake that has
# an output `salt`: { outputs = _: { salt = "…"; }; }. Only /bin/sh is needed, no network.
{
  description = "500 derivations in 10 layers";

  # To follow the empty path is to be the flake itself: nothing to fetch, and an input all the same.
  inputs.salt.follows = "";

  outputs =
    { self, salt }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "x86_64-darwin" "aarch64-darwin" ];
      forEachSystem = make:
        builtins.listToAttrs (map (system: { name = system; value = make system; }) systems);

      layers = 10;
      width = 50;
      # Dependencies of a derivation: its neighbours at these distances in the layer below.
      distances = [ 0 1 7 23 ];
      # The place in a layer that is `index` steps from the first one.
      around = index: index - (index / width) * width;
    in
    {
      # The first line of the file.
      salt = builtins.head (builtins.match "([0-9A-Za-z_-]+).*" (builtins.readFile ./salt));

      packages = forEachSystem (
        system:
        let
          name = layer: index: "layer${toString layer}-${toString index}";
          package = below: layer: index:
            derivation {
              name = "${name layer index}-${salt.salt}";
              inherit system;
              below = map (distance: builtins.elemAt below (around (index + distance))) (
                if below == [ ] then [ ] else distances
              );
              builder = "/bin/sh";
              args = [ "-c" "echo \"$below\" > $out" ];
            };
          grow = below: layer: builtins.genList (package below layer) width;
          # [ [ derivation ... ] ... ], the lowest layer first.
          grown = builtins.foldl' (
            done: layer:
            done ++ [ (grow (if done == [ ] then [ ] else builtins.elemAt done (layer - 1)) layer) ]
          ) [ ] (builtins.genList (layer: layer) layers);
          named = layer: index: {
            name = name layer index;
            value = builtins.elemAt (builtins.elemAt grown layer) index;
          };
        in
        builtins.listToAttrs (
          builtins.concatLists (
            builtins.genList (layer: builtins.genList (named layer) width) layers
          )
        )
      );
    };
}
